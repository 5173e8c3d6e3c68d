"""Attention over an int8 KV cache: what it computes, and that it does not depend on company, threads or machine."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pypto_serving.kernels import Engine, KVCacheLayer, runnable
from tests.kernels import references
from tests.kernels.attention_rows import ALONE, SHAPES, Row, attend_to, random_row
from tests.kernels.heads import EPS, LAYER, LAYERS, STEPS, Work, make_work
from tests.kernels.heads import SHAPES as HEADS
from tests.kernels.heads import Shape as HeadShape
from tests.kernels.int8_pages import as_kept, from_panels, int8_cache_of, meaning
from tests.kernels.layouts import Array
from tests.kernels.references import BFLOAT16, assert_close, rotate
from tests.kernels.stage import Stage, engine_of

FIXED = 2.0**-14
"""Of the largest number of a row: rounding queries and softmax weights to 16 bits."""


def attend(engine: Engine, rows: Sequence[Row], size: int = 32, seed: int = 0) -> list[Array]:
    return attend_to(engine, rows, *int8_cache_of(rows, size, seed))


def assert_attends(found: Array, row: Row) -> None:
    """Only the result is rounded to bfloat16."""
    kept = as_kept(row)
    wanted = references.attention(kept.queries, kept.keys, kept.values, kept.first)
    spread = references.attention(kept.queries, kept.keys, np.abs(kept.values), kept.first)
    score_error = FIXED * np.abs(row.queries).max() * np.abs(kept.keys).max() * row.queries.shape[-1] ** 0.5
    weight_error = FIXED * np.abs(kept.values).max() * 4
    assert_close(found, wanted, 1.02 * BFLOAT16 * np.abs(wanted) + 2 * score_error * spread + weight_error)


@pytest.mark.parametrize("context", [1, 2, 3, 17, 31, 128, 129, 257, 1000])
def test_one_token(engine: Engine, context: int) -> None:
    for heads, kv_heads, dim, size in SHAPES:
        row = random_row(context, context - 1, 1, heads, kv_heads, dim)
        assert_attends(attend(engine, [row], size)[0], row)


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "size"), SHAPES)
def test_chunks_at_any_offset(engine: Engine, heads: int, kv_heads: int, dim: int, size: int) -> None:
    for first, count in [(0, 37), (5, 2), (127, 3), (255, 140)]:
        row = random_row(first, first, count, heads, kv_heads, dim)
        assert_attends(attend(engine, [row], size)[0], row)


@pytest.mark.parametrize("shared", [1, 3, 6, 7, 16, 49, 96])
def test_query_heads_that_share_a_key(engine: Engine, shared: int) -> None:
    row = random_row(shared, 140, 21, 2 * shared, 2, 32)
    assert_attends(attend(engine, [row])[0], row)


@settings(max_examples=10)
@given(
    rows=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 40)), min_size=1, max_size=12),
    size=st.sampled_from([32, 64, 96, 128]),
    shape=st.sampled_from([(1, 1, 32), (4, 2, 64), (5, 1, 96), (8, 8, 32)]),
    seed=st.integers(0, 1000),
)
def test_rows_of_a_step(
    rows: list[tuple[int, int]], size: int, shape: tuple[int, int, int], seed: int, engine: Engine
) -> None:
    work = [random_row(seed + i, first, count, *shape) for i, (first, count) in enumerate(rows)]
    for found, row in zip(attend(engine, work, size, seed), work, strict=True):
        assert_attends(found, row)


@pytest.mark.parametrize("scale", [2.0**-80, 2.0**-9, 2.0**20])
def test_values_of_any_size(engine: Engine, scale: float) -> None:
    row = random_row(0, 200, 5, 4, 2, 64)
    wanted = attend(engine, [row])[0]
    grown = Row(row.first, row.queries, row.keys, row.values * np.float32(scale))
    assert np.array_equal(attend(engine, [grown])[0], wanted * np.float32(scale))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), ALONE)
def test_a_query_is_the_same_in_every_chunk(instruction_set: str, heads: int, kv_heads: int, dim: int) -> None:
    row = random_row(0, 0, 301, heads, kv_heads, dim)
    whole = attend(engine_of(instruction_set), [row])[0]
    for threads, cuts in [(1, [0, 100, 137, 265, 301]), (3, [0, 1, 3, 17, 301])]:
        for begin, end in itertools.pairwise(cuts):
            found = attend(engine_of(instruction_set, threads), [row.part(begin, end)], 64, seed=begin)[0]
            assert np.array_equal(found, whole[begin:end])


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), ALONE)
def test_a_query_is_the_same_in_every_company(instruction_set: str, heads: int, kv_heads: int, dim: int) -> None:
    rows = [random_row(i, 37 * i % 600, 1 + 29 * (i % 4 == 3), heads, kv_heads, dim) for i in range(23)]
    alone = [attend(engine_of(instruction_set), [row])[0] for row in rows]
    for threads in (1, 3):
        for begin, end in [(0, 23), (3, 8)]:
            found = attend(engine_of(instruction_set, threads), rows[begin:end], 32, seed=begin)
            assert all(map(np.array_equal, found, alone[begin:end]))


def test_instruction_sets_with_fused_multiply_add_agree() -> None:
    rows = [random_row(i, 100 * i, 1 + 20 * i, 6, 2, 64) for i in range(3)]
    first, *others = (attend(engine_of(name), rows) for name in runnable() if name != "portable")
    assert all(all(map(np.array_equal, first, other)) for other in others)


def test_a_row_that_is_not_a_number_stays_alone(engine: Engine) -> None:
    rows = [random_row(i, 130, 3, 4, 2, 64) for i in range(4)]
    wanted = attend(engine, rows)
    for poison in (np.nan, np.inf):
        rows[2].queries[1:] = poison
        rows[3].keys[40] = rows[1].values[50] = poison
        with np.errstate(invalid="ignore"):
            found = attend(engine, rows)
        assert np.array_equal(found[0], wanted[0]) and np.array_equal(found[2][0], wanted[2][0])
        assert not np.isfinite(found[2][1:]).any()
        assert all((~np.isfinite(found[i])).any() for i in (1, 3))


def heads_of(engine: Engine, work: Work) -> Array:
    """Pages after QK-norm and RoPE, all bits set where nothing was written."""
    shape, stage = work.shape, Stage(engine)
    pages = stage.room(np.uint8, work.num_blocks, LAYERS, 2, shape.kv_heads, shape.size * (shape.dim + 4))
    pages[...] = 0xFF
    queries = stage.room(np.uint16, len(work.x), shape.heads, shape.dim)
    cache = KVCacheLayer(pages, LAYER, shape.dim)
    stage.record.qk_norm_rope(work.x, work.weights, work.cos, work.sin, EPS, queries, cache)
    stage.play(len(work.x), lengths=work.lengths, slots=work.slots)
    return pages


@pytest.mark.parametrize("shape", HEADS, ids=str)
@pytest.mark.parametrize("lengths", STEPS[1:4], ids=["prompt", "mixed", "decodes"])
def test_keys_and_values_are_rounded(engine: Engine, shape: HeadShape, lengths: list[tuple[int, int]]) -> None:
    """By less than half a step, of the token's and head's own largest magnitude; and nothing else is written."""
    work = make_work(shape, lengths)
    pages = heads_of(engine, work)
    normed = references.norm(work.x[:, : shape.heads + shape.kv_heads], work.weights, EPS)
    keys = rotate(normed, work.cos[work.positions], work.sin[work.positions])[:, shape.heads :]
    block, offset = work.slots // shape.size, work.slots % shape.size
    written = np.zeros((work.num_blocks, shape.size), bool)
    written[block, offset] = True
    for half, wanted in enumerate((keys, work.x[:, shape.heads + shape.kv_heads :])):
        numbers, scales = from_panels(pages[:, LAYER, half], shape.dim, half == 0)
        step = np.abs(wanted).max(-1) / 127
        assert_close(scales[block, offset], step, 1e-5 * step)
        assert_close(meaning(numbers, scales)[block, offset], wanted, 0.501 * step[..., None] * np.ones_like(wanted))
        assert np.array_equal(~np.isnan(scales).any(-1), written) and (numbers[~written] == 0xFF).all()
    assert (pages[:, np.arange(LAYERS) != LAYER] == 0xFF).all()
