"""Products of quantized weights by themselves, on memory that is in no cache."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import roofline_work as work
from roofline_kernels import LEAST_CALLS, ROTATED_BYTES, Bench, Group, Result, fill
from roofline_work import Batch

from pypto_serving.kernels import GroupStrips, Matrix, PackedForm, Strips, pack_quantized, packed_form, zeros
from pypto_serving.types.weights import CodesForm, Fp8Form, Layout, StoredCodes, StoredFp8, StoredQuantized, Table

N = K = 4096
"""Outputs and inputs of the matrices."""


@dataclass(frozen=True)
class Kind:
    """A form of weights, and whether it multiplies int8 activations."""

    name: str
    form: CodesForm | Fp8Form
    bytes: bool = True


KINDS = (
    Kind("int4 g128", CodesForm(Table.INT4, 128, "BF16")),
    Kind("int4 g128 zeros", CodesForm(Table.INT4, 128, "F16", zeros=True)),
    Kind("int4 g32", CodesForm(Table.INT4, 32, "BF16")),
    Kind("mxfp4", CodesForm(Table.E2M1, 32, "F8_E8M0")),
    Kind("int4 g128 a16", CodesForm(Table.INT4, 128, "BF16"), bytes=False),
    Kind("mxfp4 a16", CodesForm(Table.E2M1, 32, "F8_E8M0"), bytes=False),
    Kind("fp8", Fp8Form((128, 128)), bytes=False),
)


def stored(rng: np.random.Generator, form: CodesForm | Fp8Form) -> StoredQuantized:
    """A random matrix whose scales are ordinary numbers."""
    if isinstance(form, Fp8Form):
        scales = np.full((-(-N // form.block[0]), -(-K // form.block[1])), 0.01, np.float32)
        return StoredFp8(form, rng.integers(0, 0x7F, (N, K), np.uint8), scales)
    bits = {"BF16": np.uint16(0x3C00), "F16": np.float16(0.01), "F8_E8M0": np.uint8(120)}[form.scale_dtype]
    groups = (N, K // form.group)
    zeros = rng.integers(0, 16, groups, np.uint8) if form.zeros else None
    return StoredCodes(form, Layout.ROWS, rng.integers(0, 256, (N, K // 2), np.uint8), np.full(groups, bits), zeros)


def matrices(bench: Bench, form: CodesForm | Fp8Form) -> list[Matrix]:
    """As many as no cache holds, of the same bytes."""
    packed = packed_form(form, N, K)
    words = packed.words(N, K)
    scales = np.ones(N, np.float32) if packed.codes else None
    first = Matrix(zeros(np.uint32, words), N, K, None, scales, None, packed)
    pack_quantized(bench.engine, first, stored(bench.rng, form), N)
    count = max(LEAST_CALLS, -(-ROTATED_BYTES // (4 * words)))
    others = [replace(first, words=fill(zeros(np.uint32, words), first.words)) for _ in range(count - 1)]
    return [first, *others]


def strips(bench: Bench, rows: int, form: PackedForm, int8: bool) -> Strips:
    """Random activations."""
    x = bench.normal(rows * K).view(np.uint32)
    if not int8:
        return x
    groups = GroupStrips(zeros(np.uint32, rows * GroupStrips.row_words(K, form.span)), form.span, form.offset)
    quantizing = bench.recording()
    quantizing.quantize(x, K, groups)
    bench.measure(quantizing, lambda: Batch.decode(rows).inputs(bench.rng))
    return groups


def linear(kind: Kind, bench: Bench) -> Callable[[int], list[Result]]:
    """Products of several row counts with rotating weights."""
    several = matrices(bench, kind.form)
    form = several[0].form

    def run(rows: int) -> list[Result]:
        x, recording, out = strips(bench, rows, form, kind.bytes), bench.recording(), zeros(np.float32, rows, N)
        for matrix in several:
            recording.linear(x, matrix, out)
        inputs = Batch.decode(rows).inputs(bench.rng)
        rounds = bench.measure(recording, lambda: inputs)
        works = [work.linear(rows, N, K, int8=kind.bytes, stored=4 * form.words(N, K))]
        return [Result.of(f"linear {kind.name}", f"M={rows}", works, rounds.calls, rounds)]

    return run


def groups(quick: bool) -> list[Group]:
    """Every kind, in a few or many row counts."""
    rows = (1, 4, 32) if quick else (1, 2, 4, 8, 16, 32, 128)
    return [Group(f"linear {kind.name}", rows, functools.partial(linear, kind)) for kind in KINDS]
