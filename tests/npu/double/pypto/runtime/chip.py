"""The process of a device: memory by address, and kernels in numpy."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np

Links = dict[tuple[int, int], tuple[int, int]]
"""A pipe from each device to each other one."""
_NUMPY = {"float32": "<f4", "bfloat16": "<u2", "int32": "<i4", "int64": "<i8", "int8": "i1", "uint8": "u1"}


def serve(programs: list[Any], device: int, requests: int, answers: int, links: Links) -> None:
    """Answer requests for ever; only `close` ends it."""
    from pypto.runtime import receive, send

    chip = Chip(programs, device, links)
    if chip.meets_fault("init"):
        return
    send(answers, "ready")
    while True:
        name, *arguments = receive(requests)
        try:
            answer, error = getattr(chip, name)(*arguments), ""
        except Exception as failure:
            answer, error = None, f"{type(failure).__name__}: {failure}"
        send(answers, (answer, error))
        if name == "close":
            return


class Chip:
    """Owns the memory of a device. New memory holds NaN."""

    def __init__(self, programs: list[Any], device: int, links: Links) -> None:
        self._programs, self._device, self._links = programs, device, links
        self._world = 1 + sum(one == device for one, _ in links)
        self._kernels = [_load(*program.entry) for program in programs]
        self._memory: dict[int, np.ndarray] = {}
        self._dispatches = 0

    def malloc(self, nbytes: int) -> int:
        memory = np.full(nbytes, 0xFF, np.uint8)
        self._memory[memory.ctypes.data] = memory
        return memory.ctypes.data

    def free(self, address: int) -> None:
        del self._memory[address]

    def copy(self, target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def load(self, target: int, name: str) -> None:
        content = Path(name).read_bytes()
        ctypes.memmove(target, content, len(content))

    def store(self, source: int, nbytes: int, name: str) -> None:
        Path(name).write_bytes(ctypes.string_at(source, nbytes))

    def close(self) -> None:
        self._memory.clear()

    def run(self, index: int, described: list[Any]) -> None:
        """Run a kernel; one that gets a wrong shape computes NaN."""
        self._dispatches += 1
        if self.meets_fault("fail"):
            raise RuntimeError("orchestration failed: code 8")
        if self.meets_fault("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.meets_fault("hang"):
            while True:
                signal.pause()
        program, arrays, consistent = self._programs[index], {}, True
        for name, place, address, shape in described:
            parameter = program.parameters[place]
            array = _view(address, parameter.dtype, shape)
            consistent &= len(shape) == len(parameter.shape)
            consistent &= all(a in (-1, b) for a, b in zip(parameter.shape, shape, strict=False))
            arrays[name] = array
        if consistent:
            more = {"exchange": self.exchange} if self._world > 1 else {}
            self._kernels[index](**arrays, **more)
            return
        for name, place, *_ in described:
            parameter = program.parameters[place]
            if parameter.direction == "out" and arrays[name].dtype == np.float32:
                arrays[name][...] = np.nan

    def exchange(self, array: np.ndarray) -> list[np.ndarray]:
        """Return what all devices give here, in order. One waits for ever for a device that ended."""
        content, found = array.tobytes(), []
        for other in range(self._world):
            if other != self._device:
                os.write(self._links[self._device, other][1], content)
        for other in range(self._world):
            theirs = content if other == self._device else read(self._links[other, self._device][0], len(content))
            found.append(np.frombuffer(theirs, array.dtype).reshape(array.shape))
        return found

    def meets_fault(self, kind: str) -> bool:
        """Return whether this is the dispatch that shall go wrong in this way, as the first line of the file says.

        Each line happens once, and the next one then comes first.
        """
        path = Path(os.environ.get("PYPTO_DOUBLE_FAULTS", "/nonexistent"))
        first, _, others = path.read_text().partition("\n") if path.exists() else ("", "", "")
        wanted, _, number = first.partition(" ")
        if kind != wanted or self._dispatches < int(number):
            return False
        path.write_text(others)
        return True


def read(pipe: int, size: int) -> bytes:
    """Wait for so many bytes, for ever."""
    data = b""
    while len(data) < size:
        data += os.read(pipe, size - len(data))
    return data


def _view(address: int, dtype: str, shape: list[int]) -> np.ndarray:
    numpy = np.dtype(_NUMPY[dtype])
    size = int(np.prod(shape)) * numpy.itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), numpy).reshape(shape)


def _load(path: str, function: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"kernels_{abs(hash(path))}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, function)
