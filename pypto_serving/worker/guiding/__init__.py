"""Follow the grammars of rows in a process of its own, so that no grammar holds up the worker.

- `wire`: the messages between the worker and its guide process, and the memory that they share.
- `process`: the guide process, seen from the worker.
- `following`: what the guide process does: follow the outputs of rows.
- `turns`: which row it works for next.
- `walls`: what a row may take of it.
- `__main__`: the process itself.
"""
