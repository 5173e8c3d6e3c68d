"""Read the bodies of requests, and compile their grammars, without blocking the event loop.

- `reading`: decide which bodies are read in the API process, and which in the reader.
- `body_reader`: read any body, in either process; write answers that follow from the body alone.
- `process`: the reader's process, queues and jobs, seen from the API process.
- `wire`: the messages between the API process and the reader.
- `__main__`: the reader itself; its copies do the jobs.
"""
