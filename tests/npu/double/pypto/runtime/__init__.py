"""The worker: one forked process for each device, asked through pipes of which every process holds both ends.

So nobody is told when a process ends: a call waits for ever for a dead child, and a child outlives its parent.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import select
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pypto import REVISION
from pypto.ir.distributed_compiled_program import DistributedConfig, fits
from pypto.runtime.chip import read, serve

IS_JUNE = REVISION == "2026-06"


@dataclass
class RunConfig:
    """What programs are compiled and run with."""

    platform: str = "a2a3sim"
    distributed_config: Any = None
    save_kernels: bool = False
    save_kernels_dir: str | None = None


@dataclass(frozen=True)
class DeviceTensor:
    """A tensor on a device."""

    data_ptr: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class DistributedWorker:
    """Runs the programs it was prepared with."""

    def __init__(self, programs: list[Any]) -> None:
        first = programs[0]
        for program in programs:
            if program.platform != first.platform:
                raise ValueError(f"multi-program mode requires the same platform: {program.platform!r}")
            if program.distributed_config.device_ids != first.distributed_config.device_ids:
                raise ValueError("multi-program mode requires the same device_ids")
        self._programs, self._closed = programs, False
        self._allocations: dict[tuple[int, int], int] = {}
        devices = range(len(first.distributed_config.device_ids))
        self._requests, self._answers = [os.pipe() for _ in devices], [os.pipe() for _ in devices]
        links = {(one, other): os.pipe() for one in devices for other in devices if one != other}
        self._pids = []
        for device in devices:
            if (pid := os.fork()) == 0:
                try:
                    serve(programs, device, self._requests[device][0], self._answers[device][1], links)
                finally:
                    os._exit(0)
            self._pids.append(pid)
        for heard, _ in self._answers:
            receive(heard)

    def _ask(self, device: int, *request: Any) -> Any:
        return self._ask_all({device: request})[device]

    def _ask_all(self, requests: dict[int, Any]) -> dict[int, Any]:
        """Ask several devices at once; the first that fails is not waited for by the others."""
        if self._closed:
            raise RuntimeError("called after close()")
        for device, request in requests.items():
            send(self._requests[device][1], request)
        pending, found = {self._answers[device][0]: device for device in requests}, {}
        while pending:
            for heard in select.select(list(pending), [], [])[0]:
                answer, error = receive(heard)
                if error:
                    raise RuntimeError(error)
                found[pending.pop(heard)] = answer
        return found

    def run(self, compiled: Any, *args: Any, config: Any = None) -> None:
        """Run a program. Shapes of host tensors are not checked."""
        if compiled not in self._programs:
            raise ValueError("the program was not registered when this worker was constructed")
        if len(args) != len(compiled.parameters):
            raise TypeError(f"expects {len(compiled.parameters)} arguments, got {len(args)}")
        described = []
        for parameter, arg in zip(compiled.parameters, args, strict=True):
            if isinstance(arg, DeviceTensor):
                if not fits(parameter.shape, arg.shape) or arg.dtype != getattr(torch, parameter.dtype):
                    raise TypeError(f"Parameter {parameter.name!r} got {arg}")
                described.append((arg.data_ptr, arg.shape))
            elif isinstance(arg, torch.Tensor):
                if not arg.is_shared():
                    raise TypeError(f"Parameter {parameter.name!r}: must be shared memory allocated BEFORE prepare()")
                if not arg.is_contiguous():
                    raise ValueError(f"Parameter {parameter.name!r}: requires a contiguous tensor")
                described.append((arg.data_ptr(), tuple(arg.shape)))
            else:
                raise TypeError(f"Parameter {parameter.name!r} got {type(arg).__name__}")
        index = self._programs.index(compiled)
        each = [[(name, place, *described[place]) for name, place in taken] for taken in compiled.dispatches]
        self._ask_all({device: ("run", index, given) for device, given in enumerate(each)})

    if not IS_JUNE:

        def submit(self, compiled: Any, *args: Any) -> None:
            raise NotImplementedError("the double runs one dispatch at a time")

    def malloc(self, nbytes: int, *, worker_id: int = 0) -> int:
        address = int(self._ask(worker_id, "malloc", nbytes))
        self._allocations[worker_id, address] = nbytes
        return address

    def free(self, ptr: int, *, worker_id: int = 0) -> None:
        self._require_base(worker_id, ptr)
        self._ask(worker_id, "free", ptr)
        del self._allocations[worker_id, ptr]

    def copy_to(self, dst_dev_ptr: int, src_host_ptr: int, nbytes: int, *, worker_id: int = 0) -> None:
        if IS_JUNE:
            self._ask(worker_id, "copy", dst_dev_ptr, src_host_ptr, nbytes)
            return
        self._require_base(worker_id, dst_dev_ptr)
        with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="psm_") as staged:
            staged.write(ctypes.string_at(src_host_ptr, nbytes))
            staged.flush()
            self._ask(worker_id, "load", dst_dev_ptr, staged.name)

    def copy_from(self, dst_host_ptr: int, src_dev_ptr: int, nbytes: int, *, worker_id: int = 0) -> None:
        if IS_JUNE:
            self._ask(worker_id, "copy", dst_host_ptr, src_dev_ptr, nbytes)
            return
        self._require_base(worker_id, src_dev_ptr)
        with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="psm_") as staged:
            self._ask(worker_id, "store", src_dev_ptr, nbytes, staged.name)
            content = Path(staged.name).read_bytes()
            ctypes.memmove(dst_host_ptr, content, nbytes)

    def _require_base(self, device: int, ptr: int) -> None:
        if not IS_JUNE and (device, ptr) not in self._allocations:
            raise ValueError(f"requires the allocation base returned by malloc; got 0x{ptr:x}")

    def alloc_tensor(self, shape: Any, dtype: torch.dtype, *, init: Any = None, worker_id: int = 0) -> DeviceTensor:
        """Allocate a tensor, which holds NaN, or a copy of `init`."""
        if IS_JUNE and worker_id:
            raise ValueError("alloc_tensor currently only supports worker_id=0")
        address = self.malloc(math.prod(shape) * dtype.itemsize, worker_id=worker_id)
        tensor = DeviceTensor(address, tuple(shape), dtype)
        if init is not None:
            if tuple(init.shape) != tensor.shape or init.dtype != dtype or not init.is_contiguous():
                raise ValueError(f"init is {init.dtype} {tuple(init.shape)}")
            if IS_JUNE and not init.is_shared():
                raise ValueError("init must be a shared-memory tensor allocated BEFORE prepare()")
            self.copy_to(tensor.data_ptr, init.data_ptr(), tensor.nbytes, worker_id=worker_id)
        return tensor

    def close(self) -> None:
        """End the children."""
        if not self._closed:
            self._ask_all(dict.fromkeys(range(len(self._pids)), ("close",)))
            self._closed = True
            for pid in self._pids:
                os.waitpid(pid, 0)


def send(pipe: int, message: Any) -> None:
    """Write a message."""
    data = json.dumps(message).encode()
    os.write(pipe, struct.pack("<I", len(data)) + data)


def receive(pipe: int) -> Any:
    """Wait for a message, for ever."""
    (size,) = struct.unpack("<I", read(pipe, 4))
    return json.loads(read(pipe, size))


__all__ = ["DeviceTensor", "DistributedConfig", "DistributedWorker", "RunConfig"]
