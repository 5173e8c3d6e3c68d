"""Read the bodies of requests, and compile their grammars, without holding up the event loop.

- `reading`: which bodies are read here, and which by the reader.
- `body_reader`: read any body, in whichever process; write answers that follow from it alone.
- `process`: the reader, its queue and its jobs, as seen from here.
- `wire`: the messages between this process and the reader.
- `__main__`: the reader itself, each of whose jobs is done by a copy of it.
"""
