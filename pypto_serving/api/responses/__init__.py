"""Serve OpenAI's Responses API: translate its items to a conversation, and outputs to items and events.

- `endpoints`: the endpoints; keep answers in bounded memory
- `response_body`: read a body
- `history`: turn items and tools into those of chat encoders
- `format`: write answers and events
- `answers`: describe answers and the events of a stream
"""
