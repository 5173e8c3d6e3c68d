"""The matrices of a checkpoint that one packed matrix is made of. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import numpy as np

from pypto_serving.errors import ModelError
from pypto_serving.kernels import (
    BF16,
    INT8,
    PANEL,
    ElementType,
    Engine,
    Matrix,
    PackedForm,
    pack_quantized,
    pack_rounded,
    packed_form,
)
from pypto_serving.model.checkpoint import StoredTensor
from pypto_serving.model.formats.eight_bits import Int8
from pypto_serving.model.formats.matrix_tensors import MatrixTensors
from pypto_serving.model.formats.schemes import Coded, Plain, Scheme
from pypto_serving.model.tensors import StoredTensors

_STORED = {"BF16": ElementType.BF16, "F32": ElementType.F32, "F16": ElementType.F16}


class MatrixPart(Protocol):
    """`outputs` of a stored matrix [n, k]: its tensors, and the form in which they are packed."""

    n: int
    k: int
    outputs: range
    tensors: list[StoredTensor]
    form: PackedForm

    def pack(self, engine: Engine, room: Matrix, offset: int, half: int | None) -> None:
        """Pack into outputs `offset` on of `room`, or into half 0 (gate) or 1 (up) of each panel."""


class PlainPart:
    """bfloat16, float16 or float32, packed in bfloat16."""

    def __init__(self, stored: StoredTensors, module: str, outputs: range | None) -> None:
        self._stored, tensor = stored, stored[f"{module}.weight"]
        (self.n, self.k), self.tensors, self.form = tensor.shape, [tensor], BF16
        self.outputs = range(self.n) if outputs is None else outputs

    def pack(self, engine: Engine, room: Matrix, offset: int, half: int | None) -> None:
        stored = _STORED[self.tensors[0].dtype]
        _pack(engine, room, self._stored, self.tensors[0], stored, self.outputs, offset, half)


class RoundedPart(PlainPart):
    """bfloat16, float16 or float32, packed in int8 with a scale per output."""

    def __init__(self, stored: StoredTensors, module: str, outputs: range | None) -> None:
        super().__init__(stored, module, outputs)
        self.form = INT8

    def pack(self, engine: Engine, room: Matrix, offset: int, half: int | None) -> None:
        tensor = self.tensors[0]
        source = self._stored.view(tensor)[self.outputs.start : self.outputs.stop]
        pack_rounded(engine, room, source, _STORED[tensor.dtype], len(self.outputs))


class Int8Part:
    """int8 with a scale per output."""

    def __init__(self, stored: StoredTensors, module: str, scheme: Int8, outputs: range | None) -> None:
        self._stored, tensor = stored, stored[f"{module}.weight"]
        (self.n, self.k), self.form = tensor.shape, INT8
        self.outputs = range(self.n) if outputs is None else outputs
        self.tensors = [tensor, stored[f"{module}.{scheme.scale}"]]
        self._scales = MatrixTensors(stored, module).float32(scheme.scale).ravel()

    def pack(self, engine: Engine, room: Matrix, offset: int, half: int | None) -> None:
        _pack(engine, room, self._stored, self.tensors[0], ElementType.I8, self.outputs, offset, half)
        values = self._scales[self.outputs.start : self.outputs.stop]
        assert room.scales is not None
        if half is None:
            room.scales[offset : offset + len(values)] = values
        else:
            room.scales[: 2 * len(values)].reshape(-1, 2, PANEL // 2)[:, half] = values.reshape(-1, PANEL // 2)


class CodedPart:
    """Codes of 4 bits or FP8."""

    def __init__(
        self, stored: StoredTensors, module: str, scheme: Coded, n: int, k: int, outputs: range | None
    ) -> None:
        self._module, self.n, self.k = module, n, k
        self.outputs = range(n) if outputs is None else outputs
        self.tensors = [stored[name] for name in scheme.expected(module, n, k)]
        self._matrix = scheme.read(MatrixTensors(stored, module), n, k)
        try:
            self.form = packed_form(self._matrix.form, n, k)
        except ValueError as error:
            raise ModelError(f"{module}: {error}") from None

    def pack(self, engine: Engine, room: Matrix, offset: int, half: int | None) -> None:
        try:
            pack_quantized(engine, room, self._matrix, self.n, offset, half, self.outputs)
        except ValueError as error:
            raise ModelError(f"{self.tensors[0].file}: {self._module}: {error}") from None


def part_of(
    stored: StoredTensors, module: str, scheme: Scheme, shape: Sequence[int], outputs: range | None = None
) -> MatrixPart:
    """Return `outputs`, by default all, of the matrix of a module [n, k] that is stored by `scheme`."""
    match scheme:
        case Plain():
            return PlainPart(stored, module, outputs)
        case Int8():
            return Int8Part(stored, module, scheme, outputs)
    return CodedPart(stored, module, cast("Coded", scheme), shape[0], shape[1], outputs)


def _pack(
    engine: Engine,
    room: Matrix,
    stored: StoredTensors,
    tensor: StoredTensor,
    of: ElementType,
    outputs: range,
    offset: int,
    half: int | None,
) -> None:
    n, k = len(outputs), tensor.shape[1]
    begin = tensor.begin + outputs.start * k * of.bytes
    source = np.frombuffer(stored.map(tensor), np.uint8, n * k * of.bytes, begin)
    if half is None:
        engine.pack(room.words, source, of, n, k, offset, room.compensation)
    else:
        engine.pack_gate_up(room.words, source, of, n, k, half, room.compensation)
