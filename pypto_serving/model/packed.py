"""Pack a checkpoint's weights for the CPU kernels, on all threads. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pypto_serving.kernels import INT8 as INT8_FORM
from pypto_serving.kernels import PANEL, Engine, Matrix, Stored, zeros
from pypto_serving.model.checkpoint import INT8, StoredTensor
from pypto_serving.model.formats.eight_bits import scale_name
from pypto_serving.model.packed_file import PackedFile
from pypto_serving.model.tensors import Progress, StoredTensors, bfloat16, require_ids
from pypto_serving.util import ceil_div

TABLE_PIECE = 1 << 20
"""Elements of a table converted at once."""

_STORED = {"BF16": Stored.BF16, "F32": Stored.F32, "F16": Stored.F16, INT8: Stored.I8}


class PackedWeights:
    """Packs a checkpoint's tensors, each once; the packed copy is the only one in memory.

    Matrices and tables are loaded from `file` if it has them, else packed and given to it.
    """

    def __init__(
        self, model_dir: str | Path, engine: Engine, progress: Progress, file: PackedFile | None = None
    ) -> None:
        self._engine = engine
        self._file = file
        self._tensors = StoredTensors(model_dir, progress)
        self.require, self.has, self.headers = self._tensors.require, self._tensors.has, self._tensors.headers

    def vector(self, name: str) -> NDArray[np.float32]:
        """Read a vector in float32, rounded to bfloat16, the serving dtype."""
        return _rounded(self._read(name))

    def exact(self, name: str) -> NDArray[np.float32]:
        """Read a tensor in float32 without rounding."""
        return self._read(name).reshape(self._tensors[name].shape)

    def ids(self, name: str, count: int) -> NDArray[np.int32]:
        """Read a tensor of ids below `count`. Raises ModelError for others."""
        tensor = self._tensors[name]
        stored = np.frombuffer(self._tensors.map(tensor), "<i8", math.prod(tensor.shape), tensor.begin)
        require_ids(name, int(stored.min()), int(stored.max()), count)
        ids = stored.astype(np.int32).reshape(tensor.shape)
        self._tensors.forget(tensor)
        return ids

    def table(self, name: str) -> NDArray[np.uint16]:
        """Read a tensor as bfloat16, row-major."""
        tensor = self._tensors[name]

        def fill(table: NDArray[np.uint16]) -> None:
            for begin in range(0, len(table), TABLE_PIECE):
                end = min(begin + TABLE_PIECE, len(table))
                table[begin:end] = bfloat16(self._tensors.read(tensor, begin, end))
            self._tensors.forget(tensor)

        return self._packed("table", [tensor], np.uint16, math.prod(tensor.shape), fill).reshape(tensor.shape)

    def matrix(self, names: Sequence[str], bias: bool = False) -> Matrix:
        """Pack the named matrices [n_i, k] as one, concatenated along outputs; with `bias`, their biases too."""
        tensors = self._weights(names)
        n, k = sum(tensor.shape[0] for tensor in tensors), tensors[0].shape[1]

        def fill(room: Matrix) -> None:
            offset = 0
            for tensor in tensors:
                self._pack(room, tensor, offset)
                offset += tensor.shape[0]

        return self._matrices("matrix", tensors, n, k, 1, fill, self._bias(names, n) if bias else None)

    def gate_up(self, gates: Sequence[str], ups: Sequence[str]) -> Matrix:
        """Pack gate and up matrices [n, k], interleaved by half panels; experts lie one behind the other."""
        tensors = self._weights([name for pair in zip(gates, ups, strict=True) for name in pair])
        n, k = tensors[0].shape

        def fill(room: Matrix) -> None:
            for i, tensor in enumerate(tensors):
                self._pack(_nth(room, i // 2, len(gates)), tensor, half=i % 2)

        return self._matrices("gated", tensors, 2 * n, k, len(gates), fill)

    def several(self, names: Sequence[str]) -> Matrix:
        """Pack matrices of one shape [n, k] (experts), one behind the other."""
        tensors = self._weights(names)
        n, k = tensors[0].shape

        def fill(room: Matrix) -> None:
            for i, tensor in enumerate(tensors):
                self._pack(_nth(room, i, len(names)), tensor)

        return self._matrices("several", tensors, n, k, len(names), fill)

    def _matrices(
        self,
        how: str,
        tensors: Sequence[StoredTensor],
        n: int,
        k: int,
        count: int,
        fill: Callable[[Matrix], None],
        bias: NDArray[np.float32] | None = None,
    ) -> Matrix:
        """Pack `count` matrices [n, k] into one piece of memory: words, then for int8 scales and compensation."""
        outputs, int8 = Matrix.outputs(n, count), tensors[0].dtype == INT8
        words = outputs * k // (4 if int8 else 2)

        def view(memory: NDArray[np.uint32]) -> Matrix:
            if not int8:
                return Matrix(memory, n, k, bias)
            scales, compensation = memory[words:].reshape(2, outputs)
            return Matrix(memory[:words], n, k, bias, scales.view(np.float32), compensation.view(np.int32), INT8_FORM)

        scales = [self._tensors[scale_name(tensor.name)] for tensor in tensors] if int8 else []
        size = words + 2 * outputs if int8 else words
        return view(self._packed(how, [*tensors, *scales], np.uint32, size, lambda memory: fill(view(memory))))

    def _weights(self, names: Sequence[str]) -> list[StoredTensor]:
        return [self._tensors[f"{name}.weight"] for name in names]

    def _packed(
        self, how: str, tensors: Sequence[StoredTensor], dtype: Any, size: int, fill: Callable[[NDArray[Any]], None]
    ) -> NDArray[Any]:
        """Load `size` elements made of `tensors` from the file, or let `fill` write them into zeros."""
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

    def _pack(self, room: Matrix, tensor: StoredTensor, offset: int = 0, half: int | None = None) -> None:
        """Pack a tensor and its scales into outputs `offset` on of `room`, or into one half of each panel."""
        source, stored = self._stored(tensor), _STORED[tensor.dtype]
        n, k = tensor.shape
        if half is None:
            self._engine.pack(room.words, source, stored, n, k, offset, room.compensation)
        else:
            self._engine.pack_gate_up(room.words, source, stored, n, k, half, room.compensation)
        self._tensors.forget(tensor)
        if room.scales is not None:
            scales = self._read(scale_name(tensor.name))
            if half is None:
                room.scales[offset : offset + n] = scales
            else:
                room.scales[: 2 * n].reshape(-1, 2, PANEL // 2)[:, half] = scales.reshape(-1, PANEL // 2)

    def _stored(self, tensor: StoredTensor) -> NDArray[np.uint8]:
        """View the bytes of a tensor in its file's map."""
        return np.frombuffer(self._tensors.map(tensor), np.uint8, tensor.num_bytes, tensor.begin)

    def _read(self, name: str) -> NDArray[np.float32]:
        """Read a tensor in float32, flat."""
        tensor = self._tensors[name]
        values = self._tensors.read(tensor, 0, math.prod(tensor.shape))
        self._tensors.forget(tensor)
        return values


def _nth(room: Matrix, i: int, count: int) -> Matrix:
    """Return the i-th of `count` matrices."""
    words, outputs = len(room.words) // count, Matrix.outputs(room.n)
    mine = slice(i * outputs, (i + 1) * outputs)
    return replace(
        room,
        words=room.words[i * words : (i + 1) * words],
        scales=None if room.scales is None else room.scales[mine],
        compensation=None if room.compensation is None else room.compensation[mine],
    )


def _rounded(values: NDArray[np.float32]) -> NDArray[np.float32]:
    return (bfloat16(values).astype(np.uint32) << 16).view(np.float32)
