"""Read the bodies of requests without holding up the event loop.

- `wire`: the messages between this process and its readers.
- `process`: one reader process, watched from here.
- `turns`: which body a reader reads next.
- `reading`: which bodies are read here, and which by a reader.
- `__main__`: the reader itself.
"""
