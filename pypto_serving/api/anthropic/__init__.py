"""Serve Anthropic's Messages API: translate its JSON to a conversation, and outputs to content blocks and events.

- `messages`: the endpoints; write answers and events
- `messages_body`: read a body
- `history`: turn messages and tools into those of chat encoders
- `answers`: describe answers
"""
