"""The npu backend: models as compiled PyPTO programs, on Ascend NPUs or on PyPTO's simulators of them.

- `backend`: prepares everything in the order that the runtime's fork requires
- `chips`: watches the processes that the runtime forks
- `keeper`: a process that ends the worker's process group when the worker ends
- `program`: runs dispatches with the compiled programs, on a prepared worker, and checks copies
- `programs`: finds the programs of a model, and keeps compiled ones on disk
- `runtime`: the only file that imports PyPTO: its revision, shared memory, compiling, preparing
"""
