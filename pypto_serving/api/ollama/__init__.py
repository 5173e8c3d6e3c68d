"""Serve what Ollama's clients need of its API: its bodies become those of OpenAI's chats, and outputs lines of JSON.

- `endpoints`: the endpoints; describe the models
- `ollama_body`: read a body
- `line_format`: write answers as lines
"""
