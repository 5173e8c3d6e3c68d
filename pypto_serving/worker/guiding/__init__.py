"""Follow the grammars of rows in processes of their own, so that no grammar holds up the worker.

- `wire`: the messages between the worker and a guide process, and the memory that they share.
- `process`: a guide process, seen from the worker.
- `following`: what a guide process does: follow the outputs of rows.
- `turns`: which row it works for next.
- `walls`: what a row may take of it.
- `__main__`: the process itself.
"""
