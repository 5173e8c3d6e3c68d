"""Pack a checkpoint's weights for the CPU kernels, on all threads. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from pypto_serving.errors import ModelError
from pypto_serving.kernels import (
    BF16,
    BLOCK_FORMS,
    GATE_HALF,
    INT8,
    ElementType,
    Engine,
    Matrix,
    PackedForm,
    pack_blocks,
    pack_quantized,
    pack_rounded,
    packed_form,
    zeros,
)
from pypto_serving.model.checkpoint import (
    BLOCKS,
    Expected,
    Progress,
    StoredTensor,
    StoredTensors,
    bfloat16,
    require_ids,
)
from pypto_serving.model.formats.schemes import PLAIN, Coded, Int8, Plain, Scheme
from pypto_serving.model.formats.values import MatrixTensors
from pypto_serving.model.inventory import Shape
from pypto_serving.model.packed_weights_file import PackedFile
from pypto_serving.model.products import Gated, expert_outputs
from pypto_serving.parallel.topology import Rank
from pypto_serving.types.arrays import Int32Array
from pypto_serving.util import ceil_div

_STORED = {"BF16": ElementType.BF16, "F32": ElementType.F32, "F16": ElementType.F16}


class MatrixPart:
    """`outputs` of a stored matrix [n, k], by default all: its tensors, and the form to pack."""

    def __init__(
        self,
        stored: StoredTensors,
        module: str,
        shape: Sequence[int],
        outputs: range | None,
        tensors: list[StoredTensor],
        form: PackedForm,
    ) -> None:
        self.stored, self.module, (self.n, self.k) = stored, module, shape
        self.outputs = range(self.n) if outputs is None else outputs
        self.tensors, self.form = tensors, form

    def pack(self, engine: Engine, room: Matrix, offset: int, half: int | None) -> None:
        """Pack into `room` from output `offset` on, or into half 0 (gate) or 1 (up) of each panel."""
        raise NotImplementedError


class FloatPart(MatrixPart):
    """bfloat16, float16 or float32, packed in bfloat16, or `rounded` to int8 with a scale per output."""

    def __init__(self, stored: StoredTensors, module: str, outputs: range | None, rounded: bool = False) -> None:
        tensor = stored[f"{module}.weight"]
        super().__init__(stored, module, tensor.shape, outputs, [tensor], INT8 if rounded else BF16)

    def pack(self, engine: Engine, room: Matrix, offset: int, half: int | None) -> None:
        tensor = self.tensors[0]
        if self.form == BF16:
            _pack_elements(self, engine, room, _STORED[tensor.dtype], offset, half)
        else:
            source = self.stored.view(tensor)[self.outputs.start : self.outputs.stop]
            pack_rounded(engine, room, source, _STORED[tensor.dtype], len(self.outputs))


class Int8Part(MatrixPart):
    """int8 with a scale per output."""

    def __init__(self, stored: StoredTensors, module: str, scheme: Int8, outputs: range | None) -> None:
        tensors = [stored[f"{module}.weight"], stored[f"{module}.{scheme.scale}"]]
        super().__init__(stored, module, tensors[0].shape, outputs, tensors, INT8)
        self._scales = MatrixTensors(stored, module).float32(scheme.scale).ravel()

    def pack(self, engine: Engine, room: Matrix, offset: int, half: int | None) -> None:
        _pack_elements(self, engine, room, ElementType.I8, offset, half)
        room.fill_scales(self._scales[self.outputs.start : self.outputs.stop], offset, half)


class CodedPart(MatrixPart):
    """Codes of 4 bits or FP8."""

    def __init__(
        self, stored: StoredTensors, module: str, scheme: Coded, shape: Sequence[int], outputs: range | None
    ) -> None:
        n, k = shape
        self._matrix = scheme.read(MatrixTensors(stored, module), n, k)
        try:
            form = packed_form(self._matrix.form, n, k)
        except ValueError as error:
            raise ModelError(f"{module}: {error}") from None
        super().__init__(stored, module, shape, outputs, [stored[name] for name in scheme.expected(module, n, k)], form)

    def pack(self, engine: Engine, room: Matrix, offset: int, half: int | None) -> None:
        try:
            pack_quantized(engine, room, self._matrix, self.n, offset, half, self.outputs)
        except ValueError as error:
            raise ModelError(f"{self.tensors[0].file}: {self.module}: {error}") from None


class BlocksPart(MatrixPart):
    """GGUF's blocks."""

    def __init__(self, stored: StoredTensors, module: str, outputs: range | None) -> None:
        tensor = stored[f"{module}.weight"]
        super().__init__(stored, module, tensor.shape, outputs, [tensor], BLOCK_FORMS[tensor.dtype])

    def pack(self, engine: Engine, room: Matrix, offset: int, half: int | None) -> None:
        rows = self.stored.view(self.tensors[0])[self.outputs.start : self.outputs.stop]
        pack_blocks(engine, room, self.tensors[0].dtype, rows, offset, half)


def part_of(
    stored: StoredTensors, module: str, scheme: Scheme, shape: Sequence[int], outputs: range | None = None
) -> MatrixPart:
    """Return `outputs`, by default all, of a module's matrix [n, k], stored in `scheme`."""
    match scheme:
        case Plain() if stored[f"{module}.weight"].dtype in BLOCKS:
            return BlocksPart(stored, module, outputs)
        case Plain():
            return FloatPart(stored, module, outputs)
        case Int8():
            return Int8Part(stored, module, scheme, outputs)
    return CodedPart(stored, module, cast("Coded", scheme), shape, outputs)


def _pack_elements(
    part: MatrixPart, engine: Engine, room: Matrix, of: ElementType, offset: int, half: int | None
) -> None:
    """Pack stored elements without conversion."""
    n, tensor = len(part.outputs), part.tensors[0]
    mine = part.stored.view(tensor)[part.outputs.start : part.outputs.stop]
    source = np.ascontiguousarray(mine).reshape(-1).view(np.uint8)
    engine.pack(room.words, source, of, n, part.k, offset, room.compensation, half)


TABLE_PIECE = 1 << 20
"""Elements of a table converted at once."""

Outputs = Sequence[range] | None
"""The outputs to pack of each matrix; None for all outputs of every matrix."""

_Item = TypeVar("_Item")


class PackedWeights:
    """Packs a checkpoint's tensors, each once; the packed copy is the only one in memory.

    Matrices and tables are loaded from `file` if it has them, else packed and added to it. A rank packs only some
    `outputs` of each matrix, or none; other outputs are not read.
    """

    def __init__(
        self, model_dir: str | Path, engine: Engine, progress: Progress, file: PackedFile | None = None
    ) -> None:
        self._engine = engine
        self._file = file
        self._tensors = StoredTensors(model_dir, progress)
        self._done: dict[str, NDArray[Any]] = {}
        self._schemes: Mapping[str, Scheme] = {}
        self._shapes: Mapping[str, Shape] = {}
        self.has, self.headers, self.finish = self._tensors.has, self._tensors.headers, self._tensors.finish

    def require(
        self,
        expected: Mapping[str, Expected],
        ignores: Callable[[str], bool],
        schemes: Mapping[str, Scheme] | None = None,
        shapes: Mapping[str, Shape] | None = None,
    ) -> None:
        """Check all tensors before any is read; raises ModelError (see Checkpoint.require).

        schemes, shapes: scheme and [n, k] of each matrix, by module; other matrices are not quantized.
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

    def embeds(self, module: str) -> bool:
        """Return whether tokens are looked up in the packed matrix of a module; else there is a table."""
        form = BLOCK_FORMS.get(self.headers[f"{module}.weight"].dtype)
        return form is not None and form.embeds

    def table(self, name: str, rows: range | None = None) -> NDArray[np.uint16]:
        """Read `rows` of a tensor, by default all, as bfloat16, row-major."""
        tensor = self._tensors[name]
        mine, width = range(tensor.shape[0]) if rows is None else rows, math.prod(tensor.shape[1:])

        def fill(table: NDArray[np.uint16]) -> None:
            for begin in range(0, len(table), TABLE_PIECE):
                end, first = min(begin + TABLE_PIECE, len(table)), mine.start * width
                table[begin:end] = self._tensors.read_bfloat16(tensor, first + begin, first + end)
            self._tensors.forget(tensor)

        how = "table" if rows is None else f"table {_cut([mine])}"
        return self._packed(how, [tensor], np.uint16, len(mine) * width, fill).reshape(len(mine), *tensor.shape[1:])

    def matrix(self, names: Sequence[str], outputs: Outputs = None, bias: bool = False) -> list[Matrix]:
        """Pack the named matrices [n_i, k], concatenated along outputs. Adjacent ones of one form become one Matrix.

        With `bias`, also pack their biases.
        """
        runs = groupby(self._parts(names, outputs), lambda part: part.form)
        return [self._joined([*run], bias) for _, run in runs]

    def _joined(self, parts: Sequence[MatrixPart], bias: bool) -> Matrix:
        n = sum(len(part.outputs) for part in parts)

        def fill(room: Matrix) -> None:
            offset = 0
            for part in parts:
                self._pack(part, room, offset)
                offset += len(part.outputs)

        return self._matrices("matrix", parts, n, 1, fill, self._bias(parts, n) if bias else None)

    def rounded(self, name: str, outputs: range | None = None) -> list[Matrix]:
        """Pack the named matrix of floats in int8, with a scale per output. Raises ModelError for others."""
        dtype = self.headers[f"{name}.weight"].dtype
        if (scheme := self._schemes.get(name, PLAIN)) != PLAIN or dtype in BLOCKS:
            stored = scheme.name or dtype
            raise ModelError(f"{name} is stored as {stored}, and is not rounded to int8; drop the option head")
        part = FloatPart(self._tensors, name, outputs, rounded=True)
        if not part.outputs:
            return []
        return [self._matrices("rounded", [part], len(part.outputs), 1, lambda room: self._pack(part, room))]

    def gate_up(
        self,
        gates: Sequence[str],
        ups: Sequence[str],
        outputs: Outputs = None,
        up_outputs: Outputs = None,
        bias: bool = False,
    ) -> list[Gated]:
        """Pack gate and up matrices [n, k] of experts; matrices of equal forms are concatenated.

        `up_outputs`: the outputs of ups, if they differ from those of gates. `bias`: as in `matrix`, of a single pair.
        """
        parts = [*zip(self._parts(gates, outputs), self._parts(ups, up_outputs or outputs), strict=True)]
        forms = [(gate.form, up.form) for gate, up in parts]
        return [self._gated(pairs, places, bias) for places, pairs in _sets(parts, forms)]

    def _gated(self, pairs: Sequence[tuple[MatrixPart, MatrixPart]], places: Int32Array | None, bias: bool) -> Gated:
        """Interleave gate and up by half panels, or pack them separately if their forms differ."""
        n = len(pairs[0][0].outputs)
        biases = [self._bias([part], n) if bias else None for part in pairs[0]]
        if pairs[0][0].form != pairs[0][1].form:
            halves = [self._stacked([pair[half] for pair in pairs], places) for half in (0, 1)]
            return [replace(half, bias=own) for half, own in zip(halves, biases, strict=True)]
        parts = [part for pair in pairs for part in pair]
        both = _interleaved([own for own in biases if own is not None], n) if bias else None

        def fill(room: Matrix) -> None:
            for i, part in enumerate(parts):
                self._pack(part, _nth(room, i // 2, len(pairs)), half=i % 2)

        return [replace(self._matrices("gated", parts, 2 * n, len(pairs), fill, both), places=places)]

    def several(self, names: Sequence[str], outputs: Outputs = None) -> list[Matrix]:
        """Pack matrices [n, k] of experts; matrices of equal form are concatenated."""
        parts = self._parts(names, outputs)
        return [self._stacked(some, places) for places, some in _sets(parts, [part.form for part in parts])]

    def experts(
        self, rank: Rank, names: tuple[Sequence[str], Sequence[str], Sequence[str]], width: int, hidden: int
    ) -> tuple[list[Gated], list[Matrix]]:
        """Pack the rank's part of experts with `width` inner outputs: gate and up, then down; `names` are of these."""
        (gates, ups, downs), count = names, len(names[0])
        inner, outer = rank.expert_columns(width, GATE_HALF), rank.expert_columns(hidden)
        gate_up = self.gate_up(gates, ups, expert_outputs(rank, count, inner))
        return gate_up, self.several(downs, expert_outputs(rank, count, outer))

    def _stacked(self, parts: Sequence[MatrixPart], places: Int32Array | None) -> Matrix:
        def fill(room: Matrix) -> None:
            for i, part in enumerate(parts):
                self._pack(part, _nth(room, i, len(parts)))

        return replace(self._matrices("several", parts, len(parts[0].outputs), len(parts), fill), places=places)

    def _pack(self, part: MatrixPart, room: Matrix, offset: int = 0, half: int | None = None) -> None:
        part.pack(self._engine, room, offset, half)
        for tensor in part.tensors:
            self._tensors.forget(tensor)

    def _parts(self, modules: Sequence[str], outputs: Outputs) -> list[MatrixPart]:
        """Return the outputs of each matrix to pack; omit matrices without any."""
        parts = []
        for module, mine in zip(modules, [None] * len(modules) if outputs is None else outputs, strict=True):
            if mine is None or mine:
                stored = self._schemes.get(module, PLAIN), self._shapes.get(module, ())
                parts.append(part_of(self._tensors, module, *stored, mine))
        return parts

    def _matrices(
        self,
        how: str,
        parts: Sequence[MatrixPart],
        n: int,
        count: int,
        fill: Callable[[Matrix], None],
        bias: NDArray[np.float32] | None = None,
    ) -> Matrix:
        """Pack `count` matrices of n outputs into one piece of memory: words, then the outputs' scales and the like."""
        form, k, outputs = parts[0].form, parts[0].k, Matrix.outputs(n, count)
        words, rows = form.words(n, k, count), form.own_words

        def view(memory: NDArray[np.uint32]) -> Matrix:
            own = memory[words:].reshape(rows, outputs)
            scales = own[0].view(np.float32) if rows else None
            return Matrix(memory[:words], n, k, bias, scales, own[1].view(np.int32) if rows > 1 else None, form)

        tensors = [tensor for part in parts for tensor in part.tensors]
        if any(len(part.outputs) < part.n for part in parts):
            how = f"{how} {_cut([part.outputs for part in parts])}"
        size = words + rows * outputs
        return view(self._packed(f"{how} {form.name}", tensors, np.uint32, size, lambda memory: fill(view(memory))))

    def _packed(
        self, how: str, tensors: Sequence[StoredTensor], dtype: Any, size: int, fill: Callable[[NDArray[Any]], None]
    ) -> NDArray[Any]:
        """Load `size` elements, made from `tensors`, from the file, or let `fill` write them into zeros."""
        name = " ".join([how, *(tensor.name for tensor in tensors)])
        if name in self._done:
            return self._done[name]
        array = None if self._file is None else self._file.load(name, dtype, size)
        if array is not None:
            for tensor in tensors:
                self._tensors.count(tensor)
        else:
            fill(array := zeros(dtype, size))
            if self._file is not None:
                self._file.keep(name, array)
        self._done[name] = array
        return array

    def _bias(self, parts: Sequence[MatrixPart], n: int) -> NDArray[np.float32] | None:
        if not self.has(f"{parts[0].module}.bias"):
            return None
        bias = np.zeros(ceil_div(n, 32) * 32, np.float32)
        read = [self.vector(f"{part.module}.bias")[part.outputs.start : part.outputs.stop] for part in parts]
        bias[:n] = np.concatenate(read)
        return bias

    def _read(self, name: str) -> NDArray[np.float32]:
        """Read a tensor in float32, flat."""
        tensor = self._tensors[name]
        values = self._tensors.read(tensor, 0, math.prod(tensor.shape))
        self._tensors.forget(tensor)
        return values


def _sets(experts: Sequence[_Item], forms: Sequence[object]) -> Iterator[tuple[Int32Array | None, list[_Item]]]:
    """Yield the experts of each form, and the index of every expert among them; no indices if there is one form."""
    by_form: dict[object, list[int]] = {}
    for expert, form in enumerate(forms):
        by_form.setdefault(form, []).append(expert)
    for members in by_form.values():
        places = None
        if len(by_form) > 1:
            places = np.full(len(experts), -1, np.int32)
            places[members] = np.arange(len(members))
        yield places, [experts[expert] for expert in members]


def _interleaved(biases: Sequence[NDArray[np.float32]], n: int) -> NDArray[np.float32]:
    """Return the biases of gate and up with `n` outputs each in the order of a matrix that interleaves both."""
    halves = [own.reshape(-1, GATE_HALF)[: ceil_div(n, GATE_HALF)] for own in biases]
    return np.stack(halves, axis=1).ravel()


def _cut(outputs: Sequence[range]) -> str:
    """Return a name of the matrices' outputs for a file; equal outputs are named only once."""
    names = [f"{mine.start}:{mine.stop}" for mine in outputs]
    return ",".join(names[:1] if len(set(names)) == 1 else names)


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
