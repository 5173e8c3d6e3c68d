"""The npu backend: models as compiled PyPTO programs, on Ascend NPUs or on PyPTO's simulators of them.

- `backend`: prepares everything in the order that the runtime's fork needs
- `chips`: watches the processes that the runtime forks
- `keeper`: a process that ends the worker's process group when the worker ends
- `program`: dispatches become runs of the compiled programs, on a prepared worker with checked copies
- `programs`: finds the programs of a model, and keeps compiled ones on disk
- `runtime`: imports PyPTO, which nothing else does: its revision, shared memory, compiling, preparing
"""
