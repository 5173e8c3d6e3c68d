"""Parse outputs: a reader for reasoning, then one for tool calls.

- `scanner`: the text of one output and its parts, reasoning, and the steps that readers share
- `recovery`: which calls are read although they are slightly wrong, and how calls stand in text
- `json_calls`: JSON that comes in pieces
- `families`: the forms of calls by name, and which of them a chat template teaches
- `tagged`, `pythonic`: calls with tags and calls in Python; those of JSON are in `families`
- `qwen3_coder`, `dsml`: the tags of a form each
"""
