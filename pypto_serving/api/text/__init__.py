"""Convert text to token ids and back. Never imports torch.

- `files`: read special tokens and end-of-sequence ids from a checkpoint.
- `tokenizer`: encode text, decode whole sequences.
- `detokenizer`: decode one output token by token.
"""
