"""The kernels' Engine of threads, and memory in huge pages."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pypto_serving.errors import ConfigError
from pypto_serving.kernels.abi import Handle, library, loaded, runnable
from pypto_serving.kernels.constants import GATE_HALF
from pypto_serving.kernels.forms import ElementType, Matrix
from pypto_serving.types.arrays import Array, Int32Array, PairArray
from pypto_serving.util import ceil_div

HUGE_PAGE_BYTES, _POOL_BYTES, _LINE_BYTES = 2 << 20, 64 << 20, 64


class MemoryPool:
    """Owns memory that `map_memory` maps. Small arrays are placed one after the other, to share huge pages.

    In mappings of their own, 27 % of the int8 weights of a 0.6B model were in small pages, and a step took 5 % longer.
    """

    def __init__(self, map_memory: Callable[[int], NDArray[np.uint8]]) -> None:
        self._map = map_memory
        self._left = np.zeros(0, np.uint8)

    def zeros(self, dtype: Any, *shape: int) -> Array:
        """Allocate zeros. The memory lives as long as an array refers to it."""
        taken: Array = self._take(math.prod(shape) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)
        return taken

    def _take(self, size: int) -> NDArray[np.uint8]:
        if size >= _POOL_BYTES:
            return self._map(size)
        if size > len(self._left):
            self._left = self._map(_POOL_BYTES)
        taken, self._left = self._left[:size], self._left[ceil_div(size, _LINE_BYTES) * _LINE_BYTES :]
        return taken


def _map(size: int) -> NDArray[np.uint8]:
    """Map private memory, aligned to a huge page.

    Not shared: huge pages for shared memory depend on another system setting, which is off by default.
    """
    mapped = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(mapped, np.uint8)
    memory = memory[-memory.ctypes.data % HUGE_PAGE_BYTES :][:size]
    ask_for_huge_pages(memory)
    return memory


def ask_for_huge_pages(memory: NDArray[np.uint8]) -> None:
    """Ask the system for huge pages, if the library is there; the system may not have any."""
    if (lib := library()) is not None:
        lib.huge_pages(memory, memory.nbytes)


_POOL = MemoryPool(_map)


def zeros(dtype: Any, *shape: int) -> Array:
    """Allocate zeros, in huge pages if possible. Memory is committed when first written."""
    return _POOL.zeros(dtype, *shape)


def populate(memory: NDArray[np.uint8]) -> bool:
    """Let the system provide the pages of `memory` now, not at the first write. The content stays.

    Return whether this worked: it needs Linux 5.14, and free memory.
    """
    lib = library()
    return lib is not None and bool(lib.populate(memory, memory.nbytes))


def hashes(array: Array) -> NDArray[np.uint64]:
    """Hash each piece of `array` in this thread. Any change of its bytes changes a hash."""
    lib = loaded()
    out = np.zeros(lib.pieces(array.nbytes), np.uint64)
    lib.hash(array, array.nbytes, out)
    return out


def _allowed_cpus() -> set[int]:
    """Return the CPUs that this process may use. If they are unknown, return an empty set: threads run anywhere."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _has_room(out: PairArray, stored: ElementType, n: int, k: int, compensation: Int32Array | None) -> bool:
    if stored != ElementType.I8:
        return k % 2 == 0 and Matrix.size(n, k) <= out.size
    outputs = Matrix.outputs(n)
    return k % 4 == 0 and outputs * k // 4 <= out.size and compensation is not None and outputs <= compensation.size


class Engine:
    """Owns `threads` threads, including the caller's, that run kernels for one instruction set on `cpus`."""

    def __init__(self, instruction_set: str = "", threads: int = 1, cpus: set[int] | None = None) -> None:
        """Start the threads. Raises ConfigError if this machine lacks `instruction_set` (default: its best)."""
        lib = library()
        chosen = sorted(_allowed_cpus() if cpus is None else cpus)
        mask = np.array(chosen, np.int32)
        self._handle: Handle | None = lib.open(instruction_set, threads, mask, len(mask)) if lib is not None else None
        if lib is None or self._handle is None:
            if runnable() and instruction_set in ("", *runnable()):
                raise ConfigError(f"the system does not start {threads} threads; lower the option num-threads")
            has = ", ".join(runnable()) or "none: it was built without a C++ compiler"
            raise ConfigError(f"no kernels for {instruction_set or 'this machine'} here; this installation has {has}")
        self._lib = lib
        self.instruction_set = instruction_set or runnable()[0]
        self.threads = threads
        self.caller_cpus = set(chosen[:1]) if len(chosen) == threads else set(chosen)

    def pin_caller(self) -> None:
        """Keep the calling thread, and the threads it starts, off the CPUs of the engine's own threads."""
        if self.caller_cpus:
            os.sched_setaffinity(0, self.caller_cpus)

    @property
    def strip_rows(self) -> int:
        """Return the largest number of rows of a strip."""
        return int(self._lib.strip_rows(self._handle))

    def pack(
        self,
        out: PairArray,
        source: Array,
        stored: ElementType,
        n: int,
        k: int,
        offset: int = 0,
        compensation: Int32Array | None = None,
        half: int | None = None,
    ) -> None:
        """Pack a stored matrix [n, k], the first elements of `source`, into `out` from output `offset` on.

        With `half`, pack into half 0 (gate) or 1 (up) of each panel. Int8 weights also fill `compensation`. Raises
        ValueError if the rows are not whole half panels, k is not whole pairs or quads, or `source` is too short.
        """
        if half not in (None, 0, 1):
            raise ValueError(f"half is {half}, but must be 0 or 1")
        outputs, is_whole = (offset + n, not offset % GATE_HALF) if half is None else (2 * n, not n % GATE_HALF)
        if not is_whole or offset < 0 or min(n, k) < 1 or not _has_room(out, stored, outputs, k, compensation):
            raise ValueError(f"[{n}, {k}] does not go into {out.size} words at output {offset}, half {half}")
        if source.nbytes < n * k * stored.bytes:
            raise ValueError(f"{source.nbytes} bytes hold no [{n}, {k}] of {stored.name}")
        places = {"offset": offset if half is None else half * GATE_HALF, "half": half is not None}
        weights = {"source": source, "stored": stored, "compensation": compensation}
        self._lib.pack(self._handle, out=out, **weights, n=n, k=k, **places)

    def read(self, out: Array, file: int, offset: int) -> NDArray[np.uint64]:
        """Read `out` from byte `offset` of an open file on, and return its `hashes`. Raises OSError."""
        pieces = np.zeros(self._lib.pieces(out.nbytes), np.uint64)
        if error := self._lib.read(self._handle, file, offset, out, out.nbytes, pieces):
            raise OSError(error, os.strerror(error))
        return pieces

    def close(self) -> None:
        """End the threads."""
        if self._handle:
            self._lib.close(self._handle)
            self._handle = None

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()
