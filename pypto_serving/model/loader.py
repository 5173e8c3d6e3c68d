"""Weights from a checkpoint, one tensor at a time, straight into the memory they are served from."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from pypto_serving.model.checkpoint import Checkpoint, StoredTensor
from pypto_serving.util import ceil_div

_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

Progress = Callable[[str, int, int], None]


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype called `name`."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


class Weights:
    """Owns the maps of a checkpoint's files while a model is built.

    Files are mapped, so the only copy made is the one into the served tensor, converted to `dtype` on the way.
    Reports `progress("weights", bytes done, bytes in total)`.
    """

    def __init__(self, model_dir: str | Path, dtype: str, progress: Progress) -> None:
        self.dtype = torch_dtype(dtype)
        self._checkpoint = Checkpoint.open(model_dir)
        self._progress = progress
        self._maps: dict[Path, mmap.mmap] = {}
        self._done = self._total = 0

    def require(self, inventory: Mapping[str, tuple[int, ...]], ignores: Callable[[str], bool]) -> None:
        """Check all tensors before any is read; raises ModelError (see Checkpoint.require)."""
        self._checkpoint.require(inventory, ignores)
        self._total = sum(t.end - t.begin for t in (self._checkpoint.tensors[name] for name in inventory))
        self._progress("weights", 0, self._total)

    def read(self, *names: str) -> Tensor:
        """A new tensor of `dtype`: the named tensors one below the other along dimension 0."""
        stored = [self._view(name) for name in names]
        rows = sum(view.shape[0] for view in stored)
        joined = torch.empty((rows, *stored[0].shape[1:]), dtype=self.dtype)
        self._copy(joined, names, stored)
        return joined

    def has(self, name: str) -> bool:
        """True if the checkpoint has a tensor called `name`."""
        return name in self._checkpoint.tensors

    def _copy(self, target: Tensor, names: Sequence[str], stored: Sequence[Tensor]) -> None:
        start = 0
        for name, view in zip(names, stored, strict=True):
            target[start : start + view.shape[0]].copy_(view)
            start += view.shape[0]
            tensor = self._checkpoint.tensors[name]
            self._forget(tensor)
            self._done += tensor.end - tensor.begin
            self._progress("weights", self._done, self._total)

    def _view(self, name: str) -> Tensor:
        tensor = self._checkpoint.tensors[name]
        dtype = _STORED[tensor.dtype]
        data = self._map(tensor.file)
        count = (tensor.end - tensor.begin) // dtype.itemsize
        return torch.frombuffer(data, dtype=dtype, count=count, offset=tensor.begin).view(tensor.shape)

    def _forget(self, tensor: StoredTensor) -> None:
        """Let the kernel take back the whole pages of a tensor that has been copied."""
        begin, end = ceil_div(tensor.begin, mmap.PAGESIZE), tensor.end // mmap.PAGESIZE
        if end > begin and hasattr(mmap, "MADV_DONTNEED"):
            start, length = begin * mmap.PAGESIZE, (end - begin) * mmap.PAGESIZE
            self._map(tensor.file).madvise(mmap.MADV_DONTNEED, start, length)

    def _map(self, file: Path) -> mmap.mmap:
        """A private map: torch wants a writable buffer, and pages are never written."""
        if file not in self._maps:
            with file.open("rb") as stream:
                self._maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[file]
