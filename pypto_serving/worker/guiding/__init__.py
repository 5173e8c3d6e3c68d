"""Follow the grammars of rows in a process of its own, so that no grammar holds up the worker.

- `wire`: the messages between the worker and the guide process, and the memory that they share.
- `server`: follow the outputs of rows.
- `__main__`: the process itself, a copy of which serves.
"""
