"""Read the bodies of requests, and compile their grammars, without holding up the event loop.

- `reading`: which bodies are read here, and which by a reader; what becomes of their grammars.
- `reader`: read any body, in whichever process; write answers that follow from it alone.
- `bodies`: a reader of bodies, as seen from here.
- `grammars`: which grammars compile.
- `lane`: a reader of grammars, as seen from here.
- `known`: what became of grammars.
- `process`: a reader's process, watched from here.
- `turns`: what a reader reads next.
- `wire`: the messages between this process and its readers.
- `loop`: what all readers do.
- `__main__`: the reader of bodies itself.
- `grammar_reader`: a reader of grammars itself.
"""
