"""Pack a checkpoint's weights for the CPU kernels, on all threads. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pypto_serving.errors import ModelError
from pypto_serving.kernels import Engine, Matrix, zeros
from pypto_serving.model.checkpoint import Expected, StoredTensor
from pypto_serving.model.contents import Shape
from pypto_serving.model.formats.schemes import PLAIN, Scheme
from pypto_serving.model.matrix_parts import Part, RoundedPart, part_of
from pypto_serving.model.packed_file import PackedFile
from pypto_serving.model.products import Gated
from pypto_serving.model.tensors import Progress, StoredTensors, bfloat16, require_ids
from pypto_serving.types.arrays import Int32Array
from pypto_serving.util import ceil_div

TABLE_PIECE = 1 << 20
"""Elements of a table converted at once."""

_Item = TypeVar("_Item")


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
        self._schemes: Mapping[str, Scheme] = {}
        self._shapes: Mapping[str, Shape] = {}
        self.has, self.headers = self._tensors.has, self._tensors.headers

    def require(
        self,
        expected: Mapping[str, Expected],
        ignores: Callable[[str], bool],
        schemes: Mapping[str, Scheme] | None = None,
        shapes: Mapping[str, Shape] | None = None,
    ) -> None:
        """Check all tensors before any is read; raises ModelError (see Checkpoint.require).

        schemes, shapes: how matrices are stored and their [n, k], by module; those without are not quantised.
        """
        self._tensors.require(expected, ignores)
        self._schemes, self._shapes = schemes or {}, shapes or {}

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
                table[begin:end] = self._tensors.read_bfloat16(tensor, begin, end)
            self._tensors.forget(tensor)

        return self._packed("table", [tensor], np.uint16, math.prod(tensor.shape), fill).reshape(tensor.shape)

    def matrix(self, names: Sequence[str], bias: bool = False) -> list[Matrix]:
        """Pack the named matrices [n_i, k], which follow each other along outputs, neighbours of one form as one.

        With `bias`, pack their biases too.
        """
        runs = groupby(((name, self._part(name)) for name in names), lambda named: named[1].form)
        return [self._joined(dict(run), bias) for _, run in runs]

    def _joined(self, named: Mapping[str, Part], bias: bool) -> Matrix:
        parts = [*named.values()]
        n = sum(part.n for part in parts)

        def fill(room: Matrix) -> None:
            offset = 0
            for part in parts:
                self._pack(part, room, offset)
                offset += part.n

        return self._matrices("matrix", parts, n, 1, fill, self._bias([*named], n) if bias else None)

    def rounded(self, name: str) -> Matrix:
        """Pack the named matrix of floats in int8, with a scale per output. Raises ModelError for others."""
        if (scheme := self._schemes.get(name, PLAIN)) != PLAIN:
            raise ModelError(f"{name} is stored as {scheme.name}, and is not rounded to int8; drop the option head")
        part = RoundedPart(self._tensors, name)
        return self._matrices("rounded", [part], part.n, 1, lambda room: self._pack(part, room))

    def gate_up(self, gates: Sequence[str], ups: Sequence[str]) -> list[Gated]:
        """Pack gate and up matrices [n, k] of experts, those of the same forms one behind the other."""
        parts = [(self._part(gate), self._part(up)) for gate, up in zip(gates, ups, strict=True)]
        forms = [(gate.form, up.form) for gate, up in parts]
        return [self._gated(pairs, places) for places, pairs in _sets(parts, forms)]

    def _gated(self, pairs: Sequence[tuple[Part, Part]], places: Int32Array | None) -> Gated:
        """Interleave gate and up by half panels, or pack them apart where their forms differ."""
        if pairs[0][0].form != pairs[0][1].form:
            return [self._stacked([pair[half] for pair in pairs], places) for half in (0, 1)]
        parts = [part for pair in pairs for part in pair]

        def fill(room: Matrix) -> None:
            for i, part in enumerate(parts):
                self._pack(part, _nth(room, i // 2, len(pairs)), half=i % 2)

        return [replace(self._matrices("gated", parts, 2 * parts[0].n, len(pairs), fill), places=places)]

    def several(self, names: Sequence[str]) -> list[Matrix]:
        """Pack matrices [n, k] of experts, those of one form one behind the other."""
        parts = [self._part(name) for name in names]
        return [self._stacked(some, places) for places, some in _sets(parts, [part.form for part in parts])]

    def _stacked(self, parts: Sequence[Part], places: Int32Array | None) -> Matrix:
        def fill(room: Matrix) -> None:
            for i, part in enumerate(parts):
                self._pack(part, _nth(room, i, len(parts)))

        return replace(self._matrices("several", parts, parts[0].n, len(parts), fill), places=places)

    def _pack(self, part: Part, room: Matrix, offset: int = 0, half: int | None = None) -> None:
        part.pack(self._engine, room, offset, half)
        for tensor in part.tensors:
            self._tensors.forget(tensor)

    def _part(self, module: str) -> Part:
        return part_of(self._tensors, module, self._schemes.get(module, PLAIN), self._shapes.get(module, ()))

    def _matrices(
        self,
        how: str,
        parts: Sequence[Part],
        n: int,
        count: int,
        fill: Callable[[Matrix], None],
        bias: NDArray[np.float32] | None = None,
    ) -> Matrix:
        """Pack `count` matrices of n outputs into one piece of memory: words, then what outputs have of their own."""
        form, k, outputs = parts[0].form, parts[0].k, Matrix.outputs(n, count)
        words, rows = form.words(n, k, count), form.own_words

        def view(memory: NDArray[np.uint32]) -> Matrix:
            own = memory[words:].reshape(rows, outputs)
            scales = own[0].view(np.float32) if rows else None
            return Matrix(memory[:words], n, k, bias, scales, own[1].view(np.int32) if rows > 1 else None, form)

        tensors = [tensor for part in parts for tensor in part.tensors]
        size = words + rows * outputs
        return view(self._packed(f"{how} {form.name}", tensors, np.uint32, size, lambda memory: fill(view(memory))))

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

    def _read(self, name: str) -> NDArray[np.float32]:
        """Read a tensor in float32, flat."""
        tensor = self._tensors[name]
        values = self._tensors.read(tensor, 0, math.prod(tensor.shape))
        self._tensors.forget(tensor)
        return values


def _sets(experts: Sequence[_Item], forms: Sequence[object]) -> Iterator[tuple[Int32Array | None, list[_Item]]]:
    """Yield the experts of each form, and the places of all experts among them; None for those of all in order."""
    by_form: dict[object, list[int]] = {}
    for expert, form in enumerate(forms):
        by_form.setdefault(form, []).append(expert)
    for members in by_form.values():
        places = None
        if len(by_form) > 1:
            places = np.full(len(experts), -1, np.int32)
            places[members] = np.arange(len(members))
        yield places, [experts[expert] for expert in members]


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
