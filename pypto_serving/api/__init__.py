"""Serve clients: translate their requests for the engine and its outputs for them. Never imports torch.

- `server`, `run`, `middleware`, `admission`, `disconnect`, `errors`: the HTTP server
- `service`, `settings`: what its handlers share
- `openai`: the endpoints of the OpenAI API
- `offline*`: the offline API, without HTTP
- `generation`: one generation, in the form that endpoints and offline API share
- `chat`: chat messages to prompts, outputs to messages, by model family
- `text`: tokenizer and detokenizer
"""
