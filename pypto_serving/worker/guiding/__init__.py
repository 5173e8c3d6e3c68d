"""Follow the grammars of rows in processes of their own, so that no grammar holds up the worker.

- `wire`: the messages between the worker and a guide process, and the memory that they share.
- `process`: a guide process, seen from the worker.
- `server`: what a guide process does: follow the outputs of rows.
- `followed_row`: one of these rows, and what its grammar costs.
- `__main__`: the process itself.
"""
