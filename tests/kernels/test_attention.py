"""Attention over paged history: any shape, any chunks, any blocks, any threads."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypto_serving.kernels import Engine, KVCacheLayer
from tests.kernels.attention_rows import (
    ALONE,
    BF16_KV,
    LAYER,
    LAYERS,
    SHAPES,
    KvForm,
    Row,
    assert_attends,
    attend,
    cache_of,
    random_row,
)
from tests.kernels.int8_pages import INT8_KV
from tests.kernels.layouts import NAN, narrow, random_bf16
from tests.kernels.references import BFLOAT16, assert_close
from tests.kernels.stage import Stage, engine_of
from tests.thinning import examples

pytestmark = pytest.mark.thinned(2)


@pytest.fixture(scope="module", params=[BF16_KV, INT8_KV], ids=["bf16", "int8"])
def kv(request: pytest.FixtureRequest) -> KvForm:
    """What the cache holds."""
    form: KvForm = request.param
    return form


@pytest.mark.thinned(1)
@pytest.mark.parametrize("context", [1, 2, 15, 16, 17, 31, 127, 128, 129, 256, 257, 1000])
def test_one_token(engine: Engine, kv: KvForm, context: int) -> None:
    for heads, kv_heads, dim, size in SHAPES:
        row = random_row(context, context - 1, 1, heads, kv_heads, dim)
        kv.assert_attends(kv.attend(engine, [row], size)[0], row)


@pytest.mark.thinned(1)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "size"), SHAPES)
def test_chunks_at_any_offset(engine: Engine, kv: KvForm, heads: int, kv_heads: int, dim: int, size: int) -> None:
    chunks = [(0, 37), (5, 2), (127, 1), (127, 3), (128, 13), (0, 130), (255, 40)]
    for first, count in chunks:
        row = random_row(first, first, count, heads, kv_heads, dim)
        kv.assert_attends(kv.attend(engine, [row], size)[0], row)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("shared", [1, 2, 3, 4, 5, 6, 7, 8, 16, 33, 48, 49, 96])
def test_query_heads_that_share_a_key(engine: Engine, kv: KvForm, shared: int) -> None:
    row = random_row(shared, 140, 21, 2 * shared, 2, 32)
    kv.assert_attends(kv.attend(engine, [row])[0], row)


@examples(10)
@given(
    rows=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 40)), min_size=1, max_size=12),
    size=st.sampled_from([32, 64, 96, 128]),
    shape=st.sampled_from([(1, 1, 32), (4, 2, 64), (5, 1, 96), (8, 8, 32)]),
    seed=st.integers(0, 1000),
)
def test_rows_of_a_step(
    rows: list[tuple[int, int]], size: int, shape: tuple[int, int, int], seed: int, engine: Engine, kv: KvForm
) -> None:
    work = [random_row(seed + i, first, count, *shape) for i, (first, count) in enumerate(rows)]
    for found, row in zip(kv.attend(engine, work, size, seed), work, strict=True):
        kv.assert_attends(found, row)


@pytest.mark.parametrize(("first", "count"), [(0, 300), (126, 5), (511, 1), (999, 1)])
def test_every_position_counts_once(engine: Engine, first: int, count: int) -> None:
    """Without scores, a dimension that is 1 at every 32nd position shows how many of those a query sees."""
    length = first + count
    values = (np.arange(length)[:, None] % 32 == np.arange(32)).astype(np.float32)[:, None]
    row = Row(first, np.zeros((count, 2, 32), np.float32), np.ones((length, 1, 32), np.float32), values)
    wanted = np.cumsum(values, axis=0)[first:] / (np.arange(first, length) + 1)[:, None, None]
    assert_close(attend(engine, [row])[0], np.repeat(wanted, 2, axis=1), 1.01 * BFLOAT16 * wanted)


@pytest.mark.parametrize("length", [1, 2, 17, 128, 129, 300])
def test_a_needle_is_found_wherever_it_lies(engine: Engine, length: int) -> None:
    """A key far above all others leaves their values out."""
    rng = np.random.default_rng(length)
    rows, spots = [], sorted({0, 1, 15, 16, 127, 128, length // 2, length - 2, length - 1} & set(range(length)))
    for spot in spots:
        keys, values = np.zeros((length, 1, 32), np.float32), random_bf16(rng, length, 1, 32)
        keys[spot] = 4
        rows.append(Row(length - 1, np.full((1, 1, 32), 4, np.float32), keys, values))
    for spot, row, found in zip(spots, rows, attend(engine, rows), strict=True):
        assert np.array_equal(found[0], row.values[spot])


@pytest.mark.parametrize("offset", [-3e4, -200, 200, 3e4])
def test_scores_far_from_zero(engine: Engine, offset: float) -> None:
    """A constant added to all scores changes nothing."""
    plain = random_row(0, 290, 10, 2, 1, 32)
    queries, keys = plain.queries.copy(), plain.keys.copy()
    queries[..., 0], keys[..., 0] = 1, 0
    wanted = attend(engine, [Row(290, queries, keys, plain.values)])[0]
    keys[..., 0] = offset
    found = attend(engine, [Row(290, queries, keys, plain.values)])[0]
    assert_close(found, wanted, 8e-8 * abs(offset) * np.abs(plain.values).max() * 10 + 4 * BFLOAT16)


def test_a_row_that_is_not_a_number_stays_alone(engine: Engine) -> None:
    rows = [random_row(i, 130, 3, 4, 2, 64) for i in range(5)]
    wanted = attend(engine, rows)
    for poison in (np.nan, np.inf):
        rows[2].queries[1:] = poison
        rows[2].keys[40:], rows[2].values[50:] = poison, poison
        found = attend(engine, rows)
        assert all(np.array_equal(found[i], wanted[i]) for i in (0, 1, 3, 4))
        assert np.isnan(found[2][1:]).any()


def test_a_key_that_is_not_a_number_is_noticed(engine: Engine) -> None:
    rows = [random_row(i, 130, 3, 4, 2, 64) for i in range(2)]
    rows[1].keys[40] = np.nan
    found = attend(engine, rows)
    assert np.isfinite(found[0]).all() and np.isnan(found[1]).all()


def test_an_empty_step_does_nothing(engine: Engine) -> None:
    stage = Stage(engine)
    pages = np.full((2, LAYERS, 2, 1, 32 * 32), NAN, np.uint16)
    stage.record.paged_attention(
        np.zeros((1, 1, 32), np.uint16), KVCacheLayer(pages, LAYER, 32), stage.strip_room(1, 32)
    )
    stage.play(0, lengths=[])


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), ALONE)
def test_a_query_is_the_same_in_every_chunk(
    instruction_set: str, kv: KvForm, heads: int, kv_heads: int, dim: int
) -> None:
    row = random_row(0, 0, 301, heads, kv_heads, dim)
    whole = kv.attend(engine_of(instruction_set), [row])[0]
    for threads, cuts in [(1, [0, 100, 137, 265, 301]), (2, [0, 128, 256, 300, 301]), (3, [0, 1, 3, 17, 301])]:
        for begin, end in itertools.pairwise(cuts):
            found = kv.attend(engine_of(instruction_set, threads), [row.part(begin, end)], 64, seed=begin)[0]
            assert np.array_equal(found, whole[begin:end])


@pytest.mark.thinned(1)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), ALONE)
def test_a_query_is_the_same_in_every_company(
    instruction_set: str, kv: KvForm, heads: int, kv_heads: int, dim: int
) -> None:
    rows = [random_row(i, 37 * i % 600, 1 + 29 * (i % 4 == 3), heads, kv_heads, dim) for i in range(23)]
    alone = [kv.attend(engine_of(instruction_set), [row])[0] for row in rows]
    for threads in (1, 2, 3, 5):
        for begin, end in [(0, 23), (3, 4), (3, 8), (20, 23)]:
            found = kv.attend(engine_of(instruction_set, threads), rows[begin:end], 32, seed=begin)
            assert all(map(np.array_equal, found, alone[begin:end]))


@pytest.mark.thinned(1)
@pytest.mark.parametrize("context", [127, 128, 129, 640, 641, 3000])
def test_a_history_cut_for_the_threads_changes_nothing(instruction_set: str, context: int) -> None:
    """With fewer rows than threads, parts of a history are computed apart and merged by who comes last."""
    rows = [random_row(i, context - 1, 1, 4, 2, 64) for i in range(2)]
    alone = [attend(engine_of(instruction_set), [row])[0] for row in rows]
    assert_attends(alone[0], rows[0])
    for threads in (2, 3, 5, 8):
        for _ in range(5):
            assert np.array_equal(attend(engine_of(instruction_set, threads), rows[:1])[0], alone[0])
            assert all(map(np.array_equal, attend(engine_of(instruction_set, threads), rows), alone))


def test_partial_results_of_one_step_are_gone_in_the_next(instruction_set: str) -> None:
    """One recording, many steps: what was kept of cut histories is written anew."""
    engine = engine_of(instruction_set, 3)
    contexts = [1000, 3, 700, 129, 1000, 512]
    rows = [random_row(i, context - 1, 1, 2, 1, 64) for i, context in enumerate(contexts)]
    pages, tables = cache_of(rows, 32, seed=0)
    stage = Stage(engine)
    queries, out = stage.room(np.uint16, 1, 2, 64), stage.strip_room(1, 128)
    stage.record.paged_attention(queries, KVCacheLayer(pages, LAYER, 64), out)
    for row, table in zip(rows, tables, strict=True):
        queries[...] = narrow(row.queries)
        stage.play(1, lengths=[(row.first, 1)], tables=table[None])
        assert_attends(stage.rows(out, 1, 128).reshape(1, 2, 64), row)
