"""Forms of packed weights and activations, see csrc/weights.h.

Activations pass between operations as float32 rows, `[rows, width]`, or as strips, the packed layout that GEMMs read:
bfloat16 pairs, int8 quads with a scale per row, or int8 or int16 quads with scales and sums of groups of inputs. All
are numpy arrays owned by the caller.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any

from pypto_serving.kernels.abi import loaded
from pypto_serving.kernels.constants import CODES_INPUTS, FP8_INPUTS, GATE_HALF, PANEL, SCALED, SUPER
from pypto_serving.types.arrays import Float32Array, Int32Array, PairArray
from pypto_serving.types.weights import CodesForm, Fp8Form, Table
from pypto_serving.util import ceil_div


class ElementType(enum.Enum):
    """Element types of stored weights."""

    BF16 = enum.auto()
    F32 = enum.auto()
    F16 = enum.auto()
    I8 = enum.auto()

    @property
    def bytes(self) -> int:
        """Return the bytes of an element."""
        return {ElementType.F32: 4, ElementType.I8: 1}.get(self, 2)


class Weights(enum.Enum):
    """Element types of packed weights."""

    BF16 = enum.auto()
    INT8 = enum.auto()
    INT4 = enum.auto()
    E2M1 = enum.auto()
    FP8 = enum.auto()
    IQ4 = enum.auto()
    BYTES = enum.auto()


class Inputs(enum.Enum):
    """Element types of packed activations."""

    BF16 = enum.auto()
    INT8 = enum.auto()
    GROUPS = enum.auto()
    WIDE_GROUPS = enum.auto()


class Blocks(enum.Enum):
    """Types of GGUF's blocks."""

    Q4_0 = enum.auto()
    Q4_1 = enum.auto()
    Q5_0 = enum.auto()
    Q5_1 = enum.auto()
    Q8_0 = enum.auto()
    Q2_K = enum.auto()
    Q3_K = enum.auto()
    Q4_K = enum.auto()
    Q5_K = enum.auto()
    Q6_K = enum.auto()
    IQ4_NL = enum.auto()
    IQ4_XS = enum.auto()
    MXFP4 = enum.auto()
    NVFP4 = enum.auto()


class Scale(enum.Enum):
    """Types of packed scales: one for each of 16 outputs, or one float32 shared by them; SPLIT is int8 times a half."""

    BF16 = enum.auto()
    F16 = enum.auto()
    F32 = enum.auto()
    E8M0 = enum.auto()
    SHARED = enum.auto()
    SPLIT = enum.auto()


@dataclass(frozen=True, slots=True)
class PackedForm:
    """The form of packed weights. In codes, bytes and FP8, `span` inputs share a scale.

    With `zeros` they also share a zero point, or with `minimums` a number that is subtracted.
    """

    weights: Weights
    scale: Scale = Scale.F32
    span: int = 0
    zeros: bool = False
    minimums: bool = False

    @property
    def name(self) -> str:
        """Return the unique name of the form."""
        parts = [self.weights.name, *((self.scale.name, str(self.span)) if self.span else ())]
        return "-".join([*parts, *["zeros"] * self.zeros, *["minimums"] * self.minimums]).lower()

    @property
    def codes(self) -> bool:
        """Return whether weights are 4-bit codes or bytes, which multiply group-quantized activations."""
        return self.weights in _OFFSETS

    @property
    def embeds(self) -> bool:
        """Return whether tokens can be looked up in weights of this form."""
        return self.weights is not Weights.FP8 and not self.zeros

    @property
    def offset(self) -> int:
        """Return the number that the kernels' table adds to the values of codes; with zero points or minimums, 1."""
        return 1 if self.zeros or self.minimums else _OFFSETS.get(self.weights, 0)

    @property
    def unit(self) -> float:
        """Return the number that represents 1 in the kernels' table."""
        return 0.5 if self.weights is Weights.E2M1 else 1.0

    def fields(self) -> dict[str, Any]:
        """Return the fields of Form in csrc/weights.h."""
        kinds = {"weights": self.weights, "scale": self.scale}
        return kinds | {"span": self.span, "zeros": self.zeros, "minimums": self.minimums}

    def words(self, n: int, k: int, count: int = 1) -> int:
        """Count the 32-bit words of `count` packed matrices [n, k]."""
        return count * ceil_div(n, PANEL) * int(loaded().panel_words(k, **self.fields()))

    @property
    def own_words(self) -> int:
        """Count the words per output outside the panels: scales, and compensations of int8."""
        return 2 if self == INT8 else int(self.codes)

    def planned_bytes(self, n: int, k: int) -> int:
        """Count the bytes of n outputs of k inputs in half panels, with their scales and compensations.

        For memory plans, without the library; same as `PackedForm::half_bytes` in csrc/weights.h.
        """
        if not self.span:
            half = GATE_HALF * k * (1 if self == INT8 else 2)
        else:
            each = _SCALE_BYTES[self.scale] * (1 + self.minimums) + GATE_HALF * self.zeros
            if self.scale is Scale.SPLIT:
                heads = SUPER // self.span
                head = ceil_div(heads * each + 2 * GATE_HALF * (1 + self.minimums), _LINE) * _LINE
            else:
                heads = math.lcm(4 * each, _LINE) // each
                head = heads * each
            lines = k // (FP8_INPUTS if self.weights in (Weights.FP8, Weights.BYTES) else 2 * FP8_INPUTS)
            half = ceil_div(ceil_div(k, self.span), heads) * head + lines * _LINE
        return n // GATE_HALF * half + 4 * self.own_words * n


BF16, INT8 = PackedForm(Weights.BF16), PackedForm(Weights.INT8)

_LINE = 64
"""Bytes per line of packed codes, bytes or FP8."""
_OFFSETS = {Weights.INT4: 8, Weights.E2M1: 12, Weights.IQ4: 128, Weights.BYTES: 128}
_SCALE_BYTES = {Scale.BF16: 32, Scale.F16: 32, Scale.F32: 64, Scale.E8M0: 16, Scale.SHARED: 4, Scale.SPLIT: 16}
"""Bytes of one group's scales in half a panel."""
_SCALES = {"BF16": Scale.BF16, "F16": Scale.F16, "F32": Scale.F32, "F8_E8M0": Scale.E8M0}
_WEIGHTS = {Table.INT4: Weights.INT4, Table.E2M1: Weights.E2M1}
_LEAST_GROUP = {Table.INT4: 32, Table.E2M1: 16}


BLOCK_FORMS = {
    "Q4_0": PackedForm(Weights.INT4, Scale.F16, 32),
    "Q4_1": PackedForm(Weights.INT4, Scale.F16, 32, minimums=True),
    "Q5_0": PackedForm(Weights.BYTES, Scale.F16, 32),
    "Q5_1": PackedForm(Weights.BYTES, Scale.F16, 32, minimums=True),
    "Q8_0": PackedForm(Weights.BYTES, Scale.F16, 32),
    "Q2_K": PackedForm(Weights.INT4, Scale.SPLIT, 16, minimums=True),
    "Q3_K": PackedForm(Weights.INT4, Scale.SPLIT, 16),
    "Q4_K": PackedForm(Weights.INT4, Scale.SPLIT, 32, minimums=True),
    "Q5_K": PackedForm(Weights.BYTES, Scale.SPLIT, 32, minimums=True),
    "Q6_K": PackedForm(Weights.BYTES, Scale.SPLIT, 16),
    "IQ4_NL": PackedForm(Weights.IQ4, Scale.F16, 32),
    "IQ4_XS": PackedForm(Weights.IQ4, Scale.SPLIT, 32),
    "MXFP4": PackedForm(Weights.E2M1, Scale.E8M0, 32),
    "NVFP4": PackedForm(Weights.E2M1, Scale.BF16, 16),
}
"""The forms in which GGUF's blocks are packed, without loss."""


def packed_form(stored: CodesForm | Fp8Form, n: int, k: int) -> PackedForm:
    """Return the form in which a stored matrix [n, k] is packed. Raises ValueError for forms without a kernel.

    Matrices of equal form can share a packed matrix. Scales of more than SCALED inputs are repeated.
    """
    if isinstance(stored, Fp8Form):
        _require_fp8(stored, k)
    else:
        _require_codes(stored, k)
    return planned_form(stored, n, k)


def planned_form(stored: CodesForm | Fp8Form, n: int, k: int) -> PackedForm:
    """Return the same as `packed_form`, or a similar form for forms without a kernel."""
    if isinstance(stored, Fp8Form):
        rows, columns = stored.block
        return PackedForm(Weights.FP8, Scale.F32 if rows % GATE_HALF and rows < n else Scale.SHARED, min(columns, k))
    group, scale = _group(stored, k), _SCALES.get(stored.scale_dtype, Scale.F32)
    return PackedForm(_WEIGHTS[stored.table], scale, min(group, SCALED), stored.zeros)


def _group(stored: CodesForm, k: int) -> int:
    return SCALED if stored.group >= k else stored.group


def _require_codes(stored: CodesForm, k: int) -> None:
    group = _group(stored, k)
    if k % CODES_INPUTS:
        raise ValueError(f"4-bit weights of {k} inputs; they must be a multiple of {CODES_INPUTS}")
    if group < _LEAST_GROUP[stored.table] or (SCALED % group and group % SCALED):
        raise ValueError(f"{stored.table.name} weights in groups of {group} inputs; 32, 64, 128 or all are supported")
    if stored.zeros and stored.table is not Table.INT4:
        raise ValueError(f"{stored.table.name} weights with zero points are not supported")
    if stored.scale_dtype not in _SCALES:
        raise ValueError(f"scales in {stored.scale_dtype}; {', '.join(_SCALES)} are supported")


def _require_fp8(stored: Fp8Form, k: int) -> None:
    columns = stored.block[1]
    if k % FP8_INPUTS or min(columns, k) % FP8_INPUTS:
        raise ValueError(f"FP8 weights of {k} inputs in blocks of {columns}; must be multiples of {FP8_INPUTS}")


@dataclass(frozen=True, slots=True)
class Matrix:
    """Packed weights of matrices [n, k], one after the other: `form.words` 32-bit words; see csrc/weights.h.

    Int8 weights have `scales` and `compensation`, each [panels of all * 32]; codes have `scales`. If only some experts
    have matrices here, `places` [experts] has the index of each expert's matrix, or -1.
    """

    words: PairArray
    n: int
    k: int
    bias: Float32Array | None = None
    scales: Float32Array | None = None
    compensation: Int32Array | None = None
    form: PackedForm = BF16
    places: Int32Array | None = None

    @property
    def int8(self) -> bool:
        """Return whether the weights are int8."""
        return self.form.weights is Weights.INT8

    def fill_scales(self, values: Float32Array, offset: int, half: int | None) -> None:
        """Write the scales of outputs from `offset` on; with `half`, of the outputs in half 0 or 1 of each panel."""
        if self.scales is None:
            raise ValueError("a matrix of codes needs scales of its outputs")
        if half is None:
            self.scales[offset : offset + len(values)] = values
        else:
            self.scales[: 2 * len(values)].reshape(-1, 2, GATE_HALF)[:, half] = values.reshape(-1, GATE_HALF)

    @staticmethod
    def size(n: int, k: int, count: int = 1) -> int:
        """Count the pairs of `count` bfloat16 matrices [n, k]."""
        return Matrix.outputs(n, count) * k // 2

    @staticmethod
    def outputs(n: int, count: int = 1) -> int:
        """Count the outputs of `count` matrices of n outputs, in whole panels."""
        return count * ceil_div(n, PANEL) * PANEL


@dataclass(frozen=True, slots=True)
class Int8Strips:
    """Int8 activations: strips of quads, uint32 [rows * k / 4], and a scale per row, float32 [rows]."""

    words: PairArray
    scales: Float32Array


@dataclass(frozen=True, slots=True)
class GroupStrips:
    """Int8 activations with a scale per SCALED inputs, for codes: strips of quads, scales and sums; `wide`: int16.

    `words` are uint32 [rows * `row_words`]. `span` and `offset` come from the weights' form.
    """

    words: PairArray
    span: int
    offset: int
    wide: bool = False

    @staticmethod
    def row_words(k: int, span: int, wide: bool = False) -> int:
        """Count the words of a row of k inputs."""
        return (k // 2 if wide else k // 4) + ceil_div(k, SCALED) + ceil_div(k, span)


@dataclass(frozen=True, slots=True)
class StripColumns:
    """Columns of bfloat16 strips [rows, width] from `first` on, into which one of several operations writes."""

    words: PairArray
    width: int
    first: int = 0

    @property
    def rows(self) -> int:
        """Return the number of rows that fit."""
        return 2 * self.words.size // self.width

    def fields(self, n: int) -> dict[str, Any]:
        """Return the fields of an operation that writes n columns. Raises ValueError if there are fewer."""
        if not 0 <= self.first <= self.width - n or (self.first | self.width) % 2:
            raise ValueError(f"{n} columns from {self.first} on are not within strips of {self.width}")
        return {"out": self.words, "stride": self.width // 2, "first": self.first}


def strip_columns(out: PairArray | StripColumns, n: int) -> dict[str, Any]:
    """Return the fields of an operation that writes n columns; plain strips have exactly n."""
    return (out if isinstance(out, StripColumns) else StripColumns(out, n)).fields(n)


Strips = PairArray | Int8Strips | GroupStrips
"""Activations that a GEMM reads: int8 if its weights are int8, either kind with codes, else bfloat16."""


def activations(x: Strips) -> dict[str, Any]:
    """Return the fields of Activations in csrc/ops.h."""
    if isinstance(x, GroupStrips):
        return {"inputs": Inputs.WIDE_GROUPS if x.wide else Inputs.GROUPS, "sum_span": x.span, "offset": x.offset}
    return {"inputs": Inputs.INT8 if isinstance(x, Int8Strips) else Inputs.BF16, "sum_span": 0, "offset": 0}


def row_words(x: Strips, k: int) -> int:
    """Count the words of a row of k inputs."""
    if isinstance(x, GroupStrips):
        return GroupStrips.row_words(k, x.span, x.wide)
    return k // 4 if isinstance(x, Int8Strips) else k // 2


def multiplies(form: PackedForm, x: Strips) -> bool:
    """Return whether there is a GEMM for these weights and activations."""
    if isinstance(x, GroupStrips):
        return form.codes and (form.span, form.offset) == (x.span, x.offset)
    if form.weights in (Weights.IQ4, Weights.BYTES) or form.minimums:
        return False
    return (form.weights is Weights.INT8) == isinstance(x, Int8Strips)


def strips_for(form: PackedForm, pairs: PairArray, int8: Int8Strips, exact: bool = False) -> Strips:
    """Return activations that weights of `form` can multiply, in the memory of `pairs` or of `int8`.

    With `exact`, codes multiply int16 activations.
    """
    if form.codes:
        return GroupStrips(int8.words, form.span, form.offset, exact)
    return int8 if form.weights is Weights.INT8 else pairs


def most_int8_words(k: int, exact: bool = False) -> int:
    """Count the words of a row of k inputs in the largest form of int8 strips, or with `exact` of int16 ones."""
    return GroupStrips.row_words(k, min(_LEAST_GROUP.values()), exact)
