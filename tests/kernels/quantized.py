"""Quantized matrices as checkpoints store them, and what they stand for in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pypto_serving.kernels import Engine, GroupStrips, Matrix, PackedForm, pack_quantized, packed_form
from pypto_serving.types.weights import CodesForm, Fp8Form, Layout, StoredCodes, StoredFp8, StoredQuantized, Table
from tests.kernels.layouts import Array, narrow, strip_bounds, widen

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_HALF = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = np.concatenate([_HALF, -_HALF])
_MAGNITUDES = np.arange(128)
_E4M3 = np.where(_MAGNITUDES < 8, _MAGNITUDES * 2.0**-9, (8 + _MAGNITUDES % 8) * 2.0 ** (_MAGNITUDES // 8 - 10.0))
E4M3 = np.concatenate([_E4M3, -_E4M3])

FORMS = [
    CodesForm(Table.INT4, 32, "BF16"),
    CodesForm(Table.INT4, 64, "F32"),
    CodesForm(Table.INT4, 128, "F16"),
    CodesForm(Table.INT4, 128, "BF16", zeros=True),
    CodesForm(Table.INT4, 32, "F32", zeros=True),
    CodesForm(Table.INT4, 64, "F16", zeros=True),
    CodesForm(Table.INT4, 1 << 20, "BF16"),
    CodesForm(Table.E2M1, 32, "F8_E8M0"),
    CodesForm(Table.E2M1, 16, "BF16"),
]
FP8_FORMS = [Fp8Form(block) for block in ((128, 128), (1, 1 << 20), (1 << 20, 1 << 20), (1, 32), (16, 64))]


@dataclass(frozen=True)
class Quantized:
    """A stored matrix, and its values [n, k] in float64."""

    stored: StoredQuantized
    values: Array

    @property
    def form(self) -> PackedForm:
        return packed_form(self.stored.form, *self.values.shape)


def laid_out(codes: Array, layout: Layout) -> Array:
    """Codes [n, k] as a file has them."""
    n, k = codes.shape
    if layout is Layout.BYTES:
        return (codes.astype(np.int16) - 8).astype(np.int8)
    if layout is Layout.ROWS:
        return codes[:, ::2] | codes[:, 1::2] << 4
    shifts = np.arange(8, dtype=np.uint32) * 4
    if layout is Layout.GPTQ:
        return (codes.T.reshape(k // 8, 8, n).astype(np.uint32) << shifts[:, None]).sum(1, dtype=np.uint32)
    parts = codes.T.reshape(k, n // 8, 8)[..., AWQ_ORDER].astype(np.uint32)
    return (parts << shifts).sum(2, dtype=np.uint32)


def random_scales(rng: np.random.Generator, dtype: str, *shape: int) -> tuple[Array, Array]:
    """Scales as stored, and as float64."""
    if dtype == "F8_E8M0":
        bits = rng.integers(110, 130, shape).astype(np.uint8)
        return bits, 2.0 ** (bits.astype(np.float64) - 127)
    values = rng.uniform(0.5, 2, shape).astype(np.float32) / 100 * rng.choice([-1, 1], shape).astype(np.float32)
    if dtype == "BF16":
        bits = narrow(values).reshape(shape)
        return bits, widen(bits).astype(np.float64)
    stored = values.astype({"F16": np.float16, "F32": np.float32}[dtype])
    return stored, stored.astype(np.float64)


def random_codes(
    rng: np.random.Generator, n: int, k: int, form: CodesForm, layout: Layout = Layout.ROWS, factor: float = 1.0
) -> Quantized:
    codes, group = rng.integers(0, 16, (n, k), np.uint8), min(form.group, k)
    stored, scales = random_scales(rng, form.scale_dtype, n, -(-k // group))
    zeros = rng.integers(0, 17, scales.shape, np.uint8) if form.zeros else None

    def wide(values: Array) -> Array:
        return np.repeat(values.astype(np.float64), group, axis=1)[:, :k]

    values = codes - (wide(zeros) if zeros is not None else 8.0) if form.table is Table.INT4 else E2M1[codes]
    matrix = StoredCodes(form, layout, np.ascontiguousarray(laid_out(codes, layout)), stored, zeros, factor)
    return Quantized(matrix, values * wide(scales) * factor)


def random_fp8(rng: np.random.Generator, n: int, k: int, form: Fp8Form) -> Quantized:
    """All finite values of the type, subnormal ones among them."""
    weights = rng.integers(0, 256, (n, k), np.uint8)
    weights[(weights & 0x7F) == 0x7F] = 1
    rows, columns = min(form.block[0], n), min(form.block[1], k)
    scales = rng.uniform(0.5, 2, (-(-n // rows), -(-k // columns))).astype(np.float32) / 100
    wide = np.repeat(np.repeat(scales.astype(np.float64), rows, axis=0)[:n], columns, axis=1)[:, :k]
    return Quantized(StoredFp8(Fp8Form((rows, columns)), weights, scales), E4M3[weights] * wide)


def room(form: PackedForm, n: int, k: int, count: int = 1, bias: Array | None = None) -> Matrix:
    """Memory of ones in every bit for `count` matrices."""
    words = np.full(form.words(n, k, count), 0xFFFFFFFF, np.uint32)
    padded = None if bias is None else np.pad(bias, (0, Matrix.outputs(n) - n))
    scales = np.ones(Matrix.outputs(n, count), np.float32) if form.codes else None
    return Matrix(words, n, k, padded, scales, None, form)


def packed(engine: Engine, parts: list[Quantized], bias: Array | None = None) -> Matrix:
    """Matrices as one, the outputs of one behind those of the other."""
    n, k = sum(len(part.values) for part in parts), parts[0].values.shape[1]
    out, offset = room(parts[0].form, n, k, bias=bias), 0
    for part in parts:
        pack_quantized(engine, out, part.stored, len(part.values), offset)
        offset += len(part.values)
    return out


def packed_gates(engine: Engine, gate: Quantized, up: Quantized) -> Matrix:
    n, k = gate.values.shape
    out = room(gate.form, 2 * n, k)
    for half, part in enumerate((gate, up)):
        pack_quantized(engine, out, part.stored, n, half=half)
    return out


def packed_experts(engine: Engine, gates: list[list[Quantized]]) -> Matrix:
    """Matrices, or pairs of gate and up, one behind the other."""
    each = [packed(engine, one) if len(one) == 1 else packed_gates(engine, *one) for one in gates]
    words, scales = (np.concatenate([getattr(one, field) for one in each]) for field in ("words", "scales"))
    return Matrix(words, each[0].n, each[0].k, None, scales, None, each[0].form)


def quantized_groups(x: Array) -> tuple[Array, Array]:
    """Rows [rows, k] as int8 and a scale of each 128 inputs; the largest magnitude is 127, ties are rounded to even."""
    rows, k = x.shape
    blocks = np.pad(x, ((0, 0), (0, -k % 128))).reshape(rows, -1, 128)
    top = np.abs(blocks).max(2).astype(np.float32)
    with np.errstate(divide="ignore", over="ignore"):
        factor = np.where(top <= np.float32(1e-30), np.float32(0), np.float32(127) / top)
    values = np.rint(blocks * factor[..., None]).astype(np.int8)
    return values.reshape(rows, -1)[:, :k], top / np.float32(127)


def rounded_groups(x: Array) -> Array:
    """What is left of rows [rows, k] in int8, float64."""
    values, scales = quantized_groups(x)
    wide: Array = values * np.repeat(scales.astype(np.float64), 128, axis=1)[:, : x.shape[1]]
    return wide


def groups_from_strips(strips: GroupStrips, rows: int, k: int, engine: Engine) -> tuple[Array, Array, Array]:
    """int8 [rows, k], scales [rows, blocks] and sums [rows, groups]."""
    words = GroupStrips.row_words(k, strips.span)
    found = np.zeros((rows, words), np.uint32)
    for begin, end in strip_bounds(rows, engine):
        found[begin:end] = strips.words[begin * words : end * words].reshape(words, end - begin).T
    quads, scales, sums = np.split(found, [k // 4, k // 4 + -(-k // 128)], axis=1)
    values = quads.copy().view(np.int8).reshape(rows, k // 4, 4)[..., [0, 2, 1, 3]].reshape(rows, k)
    return values, scales.copy().view(np.float32), sums.copy().view(np.int32)
