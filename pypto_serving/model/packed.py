"""Weights for the CPU kernels: read from a checkpoint's maps, packed by all threads. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pypto_serving.kernels import Engine, Matrix, Stored, zeros
from pypto_serving.model.checkpoint import StoredTensor
from pypto_serving.model.packed_file import PackedFile
from pypto_serving.model.tensors import Progress, StoredTensors
from pypto_serving.util import ceil_div

_STORED = {"BF16": Stored.BF16, "F32": Stored.F32, "F16": Stored.F16}
_NUMPY: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


class PackedWeights:
    """Packs a checkpoint's tensors, each once: the only copy is the one that is served.

    Matrices and tables that `file` has come from there, and it is given the others.
    """

    def __init__(
        self, model_dir: str | Path, engine: Engine, progress: Progress, file: PackedFile | None = None
    ) -> None:
        self._engine = engine
        self._file = file
        self._tensors = StoredTensors(model_dir, progress)
        self.require, self.has = self._tensors.require, self._tensors.has

    def vector(self, name: str) -> NDArray[np.float32]:
        """A tensor of one dimension in float32, rounded to bfloat16 as everything is that is served."""
        return _rounded(self._read(name))

    def table(self, name: str) -> NDArray[np.uint16]:
        """A tensor as bfloat16, in row-major order."""
        tensor = self._tensors[name]

        def fill(table: NDArray[np.uint16]) -> None:
            table[:] = _bfloat16(self._read(name))

        return self._packed("table", [tensor], np.uint16, math.prod(tensor.shape), fill).reshape(tensor.shape)

    def matrix(self, names: Sequence[str], bias: bool = False) -> Matrix:
        """The named matrices [n_i, k] as one, outputs one after the other; with their biases where there are any."""
        tensors = self._weights(names)
        n, k = sum(tensor.shape[0] for tensor in tensors), tensors[0].shape[1]

        def fill(pairs: NDArray[np.uint32]) -> None:
            offset = 0
            for tensor in tensors:
                self._pack(pairs, tensor, offset)
                offset += tensor.shape[0]

        pairs = self._packed("matrix", tensors, np.uint32, Matrix.size(n, k), fill)
        return Matrix(pairs, n, k, self._bias(names, n) if bias else None)

    def gated(self, gates: Sequence[str], ups: Sequence[str]) -> Matrix:
        """Gate and up matrices [n, k], interleaved by half panels; several pairs of them lie behind each other."""
        tensors = self._weights([name for pair in zip(gates, ups, strict=True) for name in pair])
        n, k = tensors[0].shape
        size = Matrix.size(2 * n, k)

        def fill(pairs: NDArray[np.uint32]) -> None:
            for i, tensor in enumerate(tensors):
                address, stored = self._address(tensor)
                self._engine.pack_gate(pairs[i // 2 * size :], address, stored, n, k, i % 2)
                self._tensors.forget(tensor)

        pairs = self._packed("gated", tensors, np.uint32, size * len(gates), fill)
        return Matrix(pairs, 2 * n, k)

    def several(self, names: Sequence[str]) -> Matrix:
        """Matrices of one shape [n, k], each packed by itself, one behind the other."""
        tensors = self._weights(names)
        n, k = tensors[0].shape
        size = Matrix.size(n, k)

        def fill(pairs: NDArray[np.uint32]) -> None:
            for i, tensor in enumerate(tensors):
                self._pack(pairs[i * size :], tensor, 0)

        return Matrix(self._packed("several", tensors, np.uint32, size * len(names), fill), n, k)

    def _weights(self, names: Sequence[str]) -> list[StoredTensor]:
        return [self._tensors[f"{name}.weight"] for name in names]

    def _packed(
        self, how: str, tensors: Sequence[StoredTensor], dtype: Any, size: int, fill: Callable[[NDArray[Any]], None]
    ) -> NDArray[Any]:
        """`size` elements made of `tensors`: those of the file, or what `fill` writes into zeros."""
        name = " ".join([how, *(tensor.name for tensor in tensors)])
        array = None if self._file is None else self._file.load(name, dtype, size)
        if array is not None:
            for tensor in tensors:
                self._tensors.count(tensor)
            return array
        fill(array := zeros(dtype, size))
        if self._file is not None:
            self._file.keep(name, array)
        return array

    def _bias(self, names: Sequence[str], n: int) -> NDArray[np.float32] | None:
        if not self.has(f"{names[0]}.bias"):
            return None
        bias = np.zeros(ceil_div(n, 32) * 32, np.float32)
        bias[:n] = np.concatenate([self.vector(f"{name}.bias") for name in names])
        return bias

    def _pack(self, pairs: NDArray[np.uint32], tensor: StoredTensor, offset: int) -> None:
        address, stored = self._address(tensor)
        n, k = tensor.shape
        self._engine.pack(pairs, address, stored, n, k, offset)
        self._tensors.forget(tensor)

    def _address(self, tensor: StoredTensor) -> tuple[int, Stored]:
        view = np.frombuffer(self._tensors.map(tensor), np.uint8, 1, tensor.begin)
        return view.ctypes.data, _STORED[tensor.dtype]

    def _read(self, name: str) -> NDArray[np.float32]:
        """A tensor in float32, flat."""
        tensor = self._tensors[name]
        dtype = _NUMPY[tensor.dtype]
        stored = np.frombuffer(
            self._tensors.map(tensor), dtype, (tensor.end - tensor.begin) // dtype.itemsize, tensor.begin
        )
        values = (stored.astype(np.uint32) << 16).view(np.float32) if tensor.dtype == "BF16" else stored.astype("f4")
        self._tensors.forget(tensor)
        return values


def _bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounded to the nearest, ties to even."""
    bits = np.where(np.isnan(values), np.uint32(0x7FC00000), values.view(np.uint32))
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _rounded(values: NDArray[np.float32]) -> NDArray[np.float32]:
    return (_bfloat16(values).astype(np.uint32) << 16).view(np.float32)
