"""Parse outputs: a reader for reasoning, then one for tool calls.

- `scanner`: the text of one output and its parts, reasoning, and the steps that readers share
- `json_calls`: JSON that comes in pieces
- `families`: the forms of calls by name, and which of them a chat template teaches
- `qwen3_coder`, `pythonic`, `dsml`: a form each; those of JSON are in `families`
"""
