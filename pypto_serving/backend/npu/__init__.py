"""The npu backend: models as compiled PyPTO programs, on Ascend NPUs or on PyPTO's simulators of them.

- `backend`: prepares everything in the order that the runtime's fork needs
- `chips`: watches the processes that the runtime forks
- `device`: the prepared worker: checked dispatches, uploads and copies
- `keeper`: a process that ends the worker's process group when the worker ends
- `library`: finds pypto-lib's programs of a model
- `program`: dispatches become runs of the compiled programs; KV blocks on the device
- `programs`: keeps compiled programs on disk
- `runtime`: imports PyPTO, which nothing else does: its revision, shared memory, compiling, preparing
"""
