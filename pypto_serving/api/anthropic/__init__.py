"""Serve Anthropic's Messages API: translate its JSON to a conversation, and outputs to content blocks and events.

- `messages`: the endpoints; write answers and events
- `messages_body`, `schemas`: read a body
- `history`, `tools`: turn messages and tools into those of chat encoders
- `answers`: describe answers
"""
