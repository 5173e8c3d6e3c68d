"""Serve clients: translate their requests for the engine and its outputs for them. Never imports torch.

Listed from the top down: modules import only their own line and those below. One exception: `service` imports
`generation.seeds` and `generation.prompts`, which import nothing above it, so modules form no circle.

- `run`: run the HTTP server in this process
- `server`: make the application: middleware and error handlers
- `routes`: which handler answers what
- `openapi`: describe the endpoints for /openapi.json
- `status`: answer probes and operators
- `web`: pages for browsers, and what the dashboard shows
- `batch`: the requests of files
- `reading`: where bodies are read
- `openai`, `responses`, `anthropic`, `decisions`: the endpoints of the OpenAI API, of its Responses API, of Anthropic's
  Messages API and of OpenAI's Decisions API
- `paging`: which part of a list is asked for
- `deadline`: when a request must have ended
- `respond`: answer with a generation, in any endpoint's form
- `offline`, `offline_inputs`, `offline_loop`, `offline_outputs`: the offline API, without HTTP
- `generation`: run one generation, in the form that endpoints and offline API share
- `service`: hold what all generations share: engine, tokenizer, makers of prompts
- `chat`: turn chat messages into prompts and outputs into messages, by model family
- `keys`: the API keys that clients may send
- `tracing`: the traces of requests, for a collector of OpenTelemetry
- `settings`: hold the options of the server and the sampling defaults of the checkpoint
- `text`: encode and decode text
- `connection`, `gate`, `refusals`: what connections may cost, and who was refused
- `listening`, `service_manager`, `disconnect`, `drain`, `errors`, `middleware`, `paths`: the parts of HTTP that know no
  endpoint
"""
