"""A checkpoint's stored tensors, memory-mapped while a model is built. Torch-free."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pypto_serving.errors import ModelError
from pypto_serving.model.checkpoint import Checkpoint, Expected, StoredTensor
from pypto_serving.util import ceil_div

_NUMPY: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E8M0": np.dtype("u1"),
}

Progress = Callable[[str, int, int], None]


class StoredTensors:
    """Owns the maps of a checkpoint's files and the count of what has been read.

    Reports `progress("weights", bytes done, bytes in total)`.
    """

    def __init__(self, model_dir: str | Path, progress: Progress) -> None:
        self._checkpoint = Checkpoint.open(model_dir)
        self._progress = progress
        self._maps: dict[Path, mmap.mmap] = {}
        self._done = self._total = 0
        self._expected: Mapping[str, Expected] = {}

    @property
    def headers(self) -> Mapping[str, StoredTensor]:
        """Return where all tensors are, by name."""
        return self._checkpoint.tensors

    def require(self, expected: Mapping[str, Expected], ignores: Callable[[str], bool]) -> None:
        """Check all tensors before any is read; raises ModelError (see Checkpoint.require)."""
        self._checkpoint.require(expected, ignores)
        self._expected = expected
        self._total = sum(self._checkpoint.tensors[name].num_bytes for name in expected)
        self._progress("weights", 0, self._total)

    def has(self, name: str) -> bool:
        """Return True if the checkpoint has a tensor called `name`."""
        return name in self._checkpoint.tensors

    def is_surplus(self, name: str) -> bool:
        """Return True if the checkpoint has a tensor called `name` that `require` was not asked for."""
        return self.has(name) and name not in self._expected

    def __getitem__(self, name: str) -> StoredTensor:
        return self._checkpoint.tensors[name]

    def map(self, tensor: StoredTensor) -> mmap.mmap:
        """Map the file of `tensor` privately: torch wants a writable buffer, and pages are never written."""
        if tensor.file not in self._maps:
            try:
                with tensor.file.open("rb") as stream:
                    self._maps[tensor.file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
            except OSError as error:
                raise ModelError(f"{tensor.file} cannot be read: {error.strerror}") from None
        return self._maps[tensor.file]

    def view(self, tensor: StoredTensor) -> NDArray[Any]:
        """View a tensor in its file's map; bfloat16 and 8-bit floats as unsigned integers."""
        stored = np.frombuffer(self.map(tensor), _NUMPY[tensor.dtype], math.prod(tensor.shape), tensor.begin)
        return stored.reshape(tensor.shape)

    def read(self, tensor: StoredTensor, begin: int, end: int) -> NDArray[np.float32]:
        """Copy elements [begin, end) of a flat `tensor` in float32."""
        dtype = _NUMPY[tensor.dtype]
        offset = tensor.begin + begin * dtype.itemsize
        stored = np.frombuffer(self.map(tensor), dtype, end - begin, offset)
        return (stored.astype("<u4") << 16).view("<f4") if tensor.dtype == "BF16" else stored.astype("<f4")

    def read_bfloat16(self, tensor: StoredTensor, begin: int, end: int) -> NDArray[np.uint16]:
        """Read elements [begin, end) of a flat `tensor` as the bits of bfloat16; those stored so are only viewed."""
        if tensor.dtype == "BF16":
            return self.view(tensor).reshape(-1)[begin:end]
        return bfloat16(self.read(tensor, begin, end))

    def forget(self, tensor: StoredTensor) -> None:
        """Count `tensor` as read, and let the kernel take back its whole pages."""
        begin, end = ceil_div(tensor.begin, mmap.PAGESIZE), tensor.end // mmap.PAGESIZE
        if end > begin and hasattr(mmap, "MADV_DONTNEED"):
            start, length = begin * mmap.PAGESIZE, (end - begin) * mmap.PAGESIZE
            self.map(tensor).madvise(mmap.MADV_DONTNEED, start, length)
        self.count(tensor)

    def finish(self) -> None:
        """Count all tensors as read; other ranks read what this one does not need."""
        if self._done < self._total:
            self._done = self._total
            self._progress("weights", self._done, self._total)

    def count(self, tensor: StoredTensor) -> None:
        """Count `tensor` as read."""
        self._done += tensor.end - tensor.begin
        self._progress("weights", self._done, self._total)


def bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to the bits of bfloat16, to nearest, ties to even."""
    bits = np.where(np.isnan(values), np.uint32(0x7FC00000), values.view(np.uint32))
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def require_ids(name: str, lowest: int, highest: int, count: int) -> None:
    """Raise ModelError unless a tensor's values, from `lowest` to `highest`, are ids below `count`."""
    for value in (lowest, highest):
        if not 0 <= value < count:
            raise ModelError(
                f"{name} holds {value}, but must hold ids from 0 to {count - 1}: the checkpoint is damaged"
            )
