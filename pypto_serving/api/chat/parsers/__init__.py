"""Parse outputs: a reader for reasoning, then one for tool calls.

- `scanner`: the text of one output as readers see it, and the steps that readers share
- `thinking`: reasoning
- `brackets`, `json_calls`: JSON that comes in pieces
- `families`: the forms of calls by name
- `choose`: which of them a chat template teaches
- `hermes`, `qwen3_coder`, `llama3_json`, `pythonic`, `mistral`, `deepseek_v3`, `deepseek_v4`, `json_text`: a form each
"""
