"""Serve OpenAI's endpoints: translate their JSON to a generation and its deltas to JSON or server-sent events.

- `completions`, `chat`, `models`, `tokenize`, `render`: the endpoints
- `body`, `schemas`, `fields`, `invalid`: parse bodies, screen unknown fields, say what is wrong
- `params`, `prompts`, `structured`, `shown`: read sampling parameters, prompts, what outputs must look like, and what
  the answer shows
- `chat_body`, `completion_body`, `tokenize_body`: read a whole body
- `described`, `answers`: describe bodies and answers
- `sse`, `chat_format`, `completion_format`, `echo_format`, `logprobs`, `usage`: write events and objects
- `best_of`: choose the best of several choices
"""
