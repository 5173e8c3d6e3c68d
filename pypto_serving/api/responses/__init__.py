"""Serve OpenAI's Responses API: translate its items to a conversation, and outputs to items and events.

- `endpoints`: the endpoints
- `response_body`, `schemas`: read a body
- `history`, `tools`: turn items and tools into those of chat encoders
- `format`: write answers and events
- `store`: keep answers in bounded memory
- `answers`: describe answers and the events of a stream
"""
