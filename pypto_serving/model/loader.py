"""Load a checkpoint's weights one tensor at a time, directly into their final memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from pypto_serving.model.checkpoint import BLOCKS, Progress, StoredTensors

_STORED = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
}

Rows = Sequence[range] | None


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype called `name`."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


class TorchWeights:
    """Copies a checkpoint's tensors to torch's default device, converted to `dtype` on the way."""

    def __init__(self, model_dir: str | Path, dtype: str, progress: Progress) -> None:
        self.dtype = torch_dtype(dtype)
        self._tensors = StoredTensors(model_dir, progress)
        self._lent = torch.empty(0, dtype=torch.uint8)
        self.require, self.has, self.finish = self._tensors.require, self._tensors.has, self._tensors.finish
        self.headers = self._tensors.headers

    def read(self, *names: str, dtype: torch.dtype | None = None, rows: Rows = None) -> Tensor:
        """Read the named tensors into a new one, concatenated along dimension 0; `dtype` defaults to the weights'.

        `rows`: rows to read of each tensor, by default all.
        """
        stored = self._views(names, rows)
        joined = torch.empty(_joined_shape(stored), dtype=dtype or self.dtype)
        self._copy(joined, names, stored)
        return joined

    def lend(self, *names: str, dtype: torch.dtype | None = None, rows: Rows = None) -> Tensor:
        """Read like `read`, but into memory that the next call overwrites.

        For weights that are then packed into other memory. Allocators rarely reuse the memory of one such copy for the
        next, so separate tensors would take as much memory as the packed weights.
        """
        stored, dtype = self._views(names, rows), dtype or self.dtype
        shape = _joined_shape(stored)
        size = math.prod(shape) * dtype.itemsize
        if len(self._lent) < size:
            self._lent = torch.empty(0, dtype=torch.uint8)
            self._lent = torch.empty(size, dtype=torch.uint8)
        joined = self._lent[:size].view(dtype).view(shape)
        self._copy(joined, names, stored)
        return joined

    def _copy(self, target: Tensor, names: Sequence[str], stored: Sequence[Tensor]) -> None:
        start = 0
        for name, view in zip(names, stored, strict=True):
            target[start : start + view.shape[0]].copy_(view)
            start += view.shape[0]
            self._tensors.forget(self._tensors[name])

    def _views(self, names: Sequence[str], rows: Rows) -> list[Tensor]:
        whole = [self._view(name) for name in names]
        if rows is None:
            return whole
        return [view[part.start : part.stop] for view, part in zip(whole, rows, strict=True)]

    def _view(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if tensor.dtype in BLOCKS:
            return torch.from_numpy(self._tensors.read(tensor, 0, math.prod(tensor.shape))).view(tensor.shape)
        dtype = _STORED[tensor.dtype]
        count = (tensor.end - tensor.begin) // dtype.itemsize
        data = self._tensors.map(tensor)
        stored = torch.frombuffer(data, dtype=dtype, count=count, offset=tensor.begin)
        return stored.as_strided(tensor.shape, (1, tensor.width)) if tensor.width else stored.view(tensor.shape)


def _joined_shape(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the shape of `tensors` concatenated along dimension 0."""
    return (sum(tensor.shape[0] for tensor in tensors), *tensors[0].shape[1:])
