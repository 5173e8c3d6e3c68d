"""Serve OpenAI's Responses API: translate its items to a conversation, and outputs to items and events.

- `endpoints`: the endpoints; keep answers in bounded memory
- `response_body`: read a body
- `history`: convert items and tools to the form that chat encoders take
- `format`: write answers and events
- `answers`: describe answers and the events of a stream
"""
