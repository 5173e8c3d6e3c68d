"""GGUF's blocks in the kernels: no loss, and products as exact as those of bfloat16 or nearer."""

from __future__ import annotations

import numpy as np
import pytest

from pypto_serving.kernels import (
    BLOCK_FORMS,
    Engine,
    GroupStrips,
    Int8Strips,
    Matrix,
    Scoring,
    pack_blocks,
    strips_for,
    zeros,
)
from pypto_serving.model.checkpoint import BLOCKS
from tests.kernels.layouts import Array, random_bf16
from tests.kernels.quantized import room, rounded_groups
from tests.kernels.references import FLOAT32, assert_close, choices, double, norm, product
from tests.kernels.stage import Stage, engine_of
from tests.model.gguf.random_blocks import random_blocks

pytestmark = pytest.mark.thinned(2)

NAMES = list(BLOCK_FORMS)
ROWS = [1, 2, 5, 7, 12, 13, 37]
INT16 = 2.0**-16
"""A step of int16 relative to the largest of its 128 inputs, rounded up."""


def random_rows(name: str, n: int, k: int, seed: int = 0) -> tuple[Array, Array]:
    """Rows of blocks, and their values in float32."""
    type = BLOCKS[name]
    rows = random_blocks(type, n * k // type.weights, seed).reshape(n, -1)
    return rows, type.dequantize(rows)


def packed(engine: Engine, name: str, *parts: Array) -> Matrix:
    k = parts[0].shape[1] // BLOCKS[name].bytes * BLOCKS[name].weights
    out, offset = room(BLOCK_FORMS[name], sum(map(len, parts)), k), 0
    for part in parts:
        pack_blocks(engine, out, name, part, offset)
        offset += len(part)
    return out


def groups(stage: Stage, matrix: Matrix, rows: int, wide: bool) -> GroupStrips:
    form = matrix.form
    words = stage.room(np.uint32, rows * GroupStrips.row_words(matrix.k, form.span, wide))
    return GroupStrips(words, form.span, form.offset, wide)


def linear(engine: Engine, x: Array, matrix: Matrix, wide: bool) -> Array:
    stage = Stage(engine)
    strips, out = groups(stage, matrix, len(x), wide), stage.room(np.float32, len(x), matrix.n)
    stage.record.quantize(stage.strips(x), matrix.k, strips)
    stage.record.linear(strips, matrix, out)
    stage.play(len(x))
    return out


def steps(x: Array) -> Array:
    """The largest magnitude of the 128 inputs that each belongs to."""
    k = x.shape[1]
    blocks = np.pad(np.abs(x), ((0, 0), (0, -k % 128))).reshape(len(x), -1, 128)
    return np.repeat(double(blocks.max(2)), 128, axis=1)[:, :k]


def error_of(x: Array, name: str, rows: Array) -> Array:
    """Roundings to float32, of which minimums and codes have their own, that cancel."""
    type = BLOCKS[name]
    size = np.abs(type.dequantize(rows).reshape(len(rows), -1, type.weights)).max(2, keepdims=True)
    for at in type.halves[1:]:
        minimums = np.abs(rows.reshape(len(rows), -1, type.bytes)[:, :, at : at + 2].copy().view("<f2").astype(float))
        size = size + minimums * 64
    largest = np.broadcast_to(size, (*size.shape[:2], type.weights)).reshape(len(rows), -1)
    return (x.shape[1] // BLOCK_FORMS[name].span * 2 + 8) * FLOAT32 * product(np.abs(x), largest) + 1e-30


@pytest.mark.parametrize("name", NAMES)
def test_products(instruction_set: str, name: str) -> None:
    """Those of the values that the blocks stand for; int16 activations are nearer than bfloat16 would be."""
    engine, widest = engine_of(instruction_set), BLOCKS[name].weights
    for n, k in [(1, widest), (33, 3 * widest), (70, 7 * widest)]:
        rows, values = random_rows(name, n, k)
        matrix = packed(engine, name, rows)
        for count in ROWS:
            x = random_bf16(np.random.default_rng(count), count, k)
            float32 = error_of(x, name, rows)
            rounding = product(steps(x) * INT16 * 0.51, np.abs(values))
            assert_close(linear(engine, x, matrix, True), product(x, values), float32 + rounding)
            assert_close(linear(engine, x, matrix, False), product(rounded_groups(x), values), float32)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wide", [False, True])
def test_rows_do_not_depend_on_others(engine: Engine, name: str, wide: bool) -> None:
    rows, _ = random_rows(name, 40, 768)
    matrix, x = packed(engine, name, rows), random_bf16(np.random.default_rng(0), 37, 768)
    alone = np.concatenate([linear(engine, row[None], matrix, wide) for row in x])
    for count in (2, 3, 6, 7, 12, 25, 37):
        assert np.array_equal(linear(engine, x[:count], matrix, wide), alone[:count])
    parts = packed(engine, name, rows[:16], rows[16:])
    assert np.array_equal(parts.words, matrix.words)


@pytest.mark.parametrize("name", NAMES)
def test_every_vector_set_has_the_same_bits(name: str, instruction_set: str) -> None:
    if instruction_set == "portable":
        pytest.skip("without fused multiply-add")
    rows, _ = random_rows(name, 40, 512)
    x = random_bf16(np.random.default_rng(0), 5, 512)
    for wide in (False, True):
        found, wanted = (linear(e, x, packed(e, name, rows), wide) for e in map(engine_of, (instruction_set, "avx2")))
        assert np.array_equal(found, wanted)


@pytest.mark.parametrize("wide", [False, True])
def test_the_largest_sums(instruction_set: str, wide: bool) -> None:
    """All codes and activations at their bounds do not overflow."""
    engine, x = engine_of(instruction_set), np.ones((3, 2816), np.float32)
    x[1] = -1
    for name in NAMES:
        type = BLOCKS[name]
        blocks = random_blocks(type, 1).repeat(16 * 2816 // type.weights, axis=0)
        for fill in (0, 255):
            rows = np.full_like(blocks, fill)
            for at in type.halves:
                rows[:, at : at + 2] = np.array([1], "<f2").view(np.uint8)
            if name == "MXFP4":
                rows[:, 0] = 127
            rows = rows.reshape(16, -1)
            values, found = type.dequantize(rows), linear(engine, x, packed(engine, name, rows), wide)
            assert_close(found, product(x, values), error_of(x, name, rows) + np.abs(product(x, values)) * INT16)


@pytest.mark.parametrize("wide", [False, True])
def test_the_norm(engine: Engine, wide: bool) -> None:
    """What it writes are the strips of its rows."""
    rng, (rows, values) = np.random.default_rng(0), random_rows("Q6_K", 32, 512)
    matrix, x = packed(engine, "Q6_K", rows), rng.standard_normal((14, 512), np.float32)
    stage, weight = Stage(engine), random_bf16(rng, 512) + 2
    strips, out = groups(stage, matrix, 14, wide), stage.room(np.float32, 14, 32)
    stage.record.rms_norm(x, weight, 1e-6, strips)
    stage.record.linear(strips, matrix, out)
    stage.play(14)
    normed = norm(x, weight, 1e-6)
    step = INT16 if wide else 2.0**-8
    assert_close(out, product(normed, values), product(steps(normed) * step, np.abs(values)))


@pytest.mark.parametrize("tokens", [1, 13, 50])
def test_experts(engine: Engine, tokens: int) -> None:
    """Rows of int16 reach their experts whole."""
    rng, count, per_token, width = np.random.default_rng(tokens), 8, 2, 256
    each = [random_rows("Q4_K", 64, width, seed) for seed in range(count)]
    parts = [packed(engine, "Q4_K", rows) for rows, _ in each]
    words, scales = (np.concatenate([getattr(one, field) for one in parts]) for field in ("words", "scales"))
    matrix = Matrix(words, 64, width, None, scales, None, BLOCK_FORMS["Q4_K"])
    x, logits = random_bf16(rng, tokens, width), rng.standard_normal((tokens, count)).astype(np.float32)
    stage, entries = Stage(engine), tokens * per_token
    routing = stage.record.route(logits, per_token, Scoring.RENORMALIZED)
    strips, gathered = groups(stage, matrix, tokens, True), groups(stage, matrix, entries, True)
    y = stage.room(np.float32, entries, 64)
    stage.record.quantize(stage.strips(x), width, strips)
    stage.record.moe_gather(routing, strips, width, gathered)
    stage.record.linear(gathered, matrix, y, routing=routing)
    stage.play(tokens)
    order, begin = np.argsort(chosen := choices(logits, per_token).ravel(), kind="stable"), 0
    for expert in range(count):
        if len(mine := order[chosen[order] == expert] // per_token):
            assert np.array_equal(y[begin : begin + len(mine)], linear(engine, x[mine], parts[expert], True))
            begin += len(mine)


@pytest.mark.parametrize("name", [name for name in NAMES if BLOCK_FORMS[name].embeds])
def test_embeddings_are_those_of_ggml(engine: Engine, name: str) -> None:
    """Bit by bit."""
    rows, values = random_rows(name, 70, 768)
    stage, tokens = Stage(engine), np.array([0, 69, 3, 15, 16, 31, 32, 47], np.int32)
    out = stage.room(np.float32, len(tokens), 768)
    stage.record.embed(packed(engine, name, rows), out)
    stage.play(len(tokens), token_ids=tokens)
    assert np.array_equal(out, values[tokens])


def test_planned_bytes_and_words_agree(engine: Engine) -> None:
    for name, form in BLOCK_FORMS.items():
        for n, k in [(32, 256), (64, 768), (4096, 4096)]:
            assert form.planned_bytes(n, k) == 4 * form.words(n, k) + 4 * n, name


def test_blocks_among_other_weights_are_refused(engine: Engine) -> None:
    rows, _ = random_rows("Q8_0", 32, 64)
    with pytest.raises(ValueError, match="do not go among"):
        pack_blocks(engine, room(BLOCK_FORMS["Q5_1"], 32, 64), "Q8_0", rows)
    matrix, stage = packed(engine, "Q8_0", rows), Stage(engine)
    with pytest.raises(ValueError, match="no activations"):
        stage.record.linear(stage.strips(np.zeros((1, 64), np.float32)), matrix, stage.room(np.float32, 1, 32))
    wide = strips_for(matrix.form, zeros(np.uint32, 1), Int8Strips(zeros(np.uint32, 99), zeros(np.float32, 1)), True)
    assert isinstance(wide, GroupStrips) and wide.wide
