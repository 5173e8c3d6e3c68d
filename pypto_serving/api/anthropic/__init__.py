"""Serve Anthropic's Messages API: translate its JSON to a conversation, and outputs to content blocks and events.

- `messages`: the endpoints; write answers and events
- `messages_body`: read a body
- `history`: convert messages and tools to the form that chat encoders take
- `answers`: describe answers
"""
