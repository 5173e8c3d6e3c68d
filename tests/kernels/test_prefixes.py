"""Attention of rows that share blocks: read once for all of them, with the bits of rows that share none."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypto_serving.kernels import KVCacheLayer
from tests.kernels.attention_rows import LAYER, Row, assert_attends, attend, attend_to, cache_of, random_row
from tests.kernels.layouts import Array, narrow
from tests.kernels.stage import Stage, engine_of, int32
from tests.thinning import examples

pytestmark = pytest.mark.thinned(2)

THREADS = (1, 2, 3)
Shape = tuple[int, int, int]
"""Heads, kv heads and dim."""


@dataclass(frozen=True)
class Branch:
    """A row that begins with the first `common` tokens of an earlier row, as far as that has them, goes on with `own`
    and computes its last `queries`. One that is its own parent shares nothing.
    """

    parent: int
    common: int
    own: int
    queries: int = 1


def grow(branches: list[Branch], shape: Shape, size: int, seed: int = 0) -> tuple[list[Row], Array, Array]:
    """The branches' rows, pages in which each has blocks of its own, and tables in which they share whole blocks."""
    rows: list[Row] = []
    blocks: list[int] = []
    for i, branch in enumerate(branches):
        row = random_row(seed + i, 0, branch.common + branch.own, *shape)
        parent = rows[branch.parent] if branch.parent < i else row
        common = min(branch.common, len(parent.keys))
        row.keys[:common], row.values[:common] = parent.keys[:common], parent.values[:common]
        rows.append(row)
        blocks.append(common // size)
    pages, tables = cache_of(rows, size, seed)
    for table, branch, count in zip(tables, branches, blocks, strict=True):
        table[:count] = tables[branch.parent, :count]
    return [last(row, branch.queries) for row, branch in zip(rows, branches, strict=True)], pages, tables


def last(row: Row, count: int) -> Row:
    """The last `count` queries of a row that computes all of them, or all if they are fewer."""
    length = len(row.queries)
    return row.part(max(0, length - count), length)


def assert_shared_changes_nothing(instruction_set: str, rows: list[Row], pages: Array, tables: Array) -> None:
    size = pages.shape[-1] // rows[0].keys.shape[2]
    alone = attend(engine_of(instruction_set), rows, size)
    for threads in THREADS:
        found = attend_to(engine_of(instruction_set, threads), rows, pages, tables)
        assert all(map(np.array_equal, found, alone))


@pytest.mark.thinned(1)
@pytest.mark.parametrize(
    "shape", [(1, 1, 32), (2, 1, 64), (8, 2, 64), (8, 1, 128), (4, 4, 32), (48, 1, 32), (98, 2, 32)]
)
def test_one_prefix_for_all(instruction_set: str, shape: Shape) -> None:
    rows, pages, tables = grow([Branch(0, 400, 1 + 37 * i) for i in range(9)], shape, 32)
    assert_shared_changes_nothing(instruction_set, rows, pages, tables)
    found = attend_to(engine_of(instruction_set, 2), rows, pages, tables)
    for row, result in zip(rows, found, strict=True):
        assert_attends(result, row)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("common", [127, 128, 129, 255, 256, 300])
@pytest.mark.parametrize("size", [32, 64, 96, 128, 256])
def test_a_prefix_may_end_anywhere(instruction_set: str, common: int, size: int) -> None:
    """Also where a block of one tile is shared and another is not, and where a row ends within the prefix."""
    branches = [Branch(0, common, own, queries) for own in (0, 1, 5, 200) for queries in (1, 3)]
    assert_shared_changes_nothing(instruction_set, *grow(branches, (4, 2, 32), size))


@pytest.mark.parametrize("shape", [(1, 1, 32), (8, 2, 32)])
def test_more_rows_than_fit_an_item(instruction_set: str, shape: Shape) -> None:
    branches = [Branch(0, 300, 1 + i, 1 + (i % 5 == 0) * (i % 4)) for i in range(64)]
    assert_shared_changes_nothing(instruction_set, *grow(branches, shape, 32))


def test_one_table_for_all(instruction_set: str) -> None:
    """Rows of different lengths in the very same blocks, also where one ends within a tile that others know whole."""
    row = random_row(0, 0, 520, 4, 2, 32)
    ends = [520, 254, 255, 256, 257, 384, 383, 130, 127, 128, 1, 512, 511, 510]
    rows = [row.part(max(0, end - 1 - i % 3), end) for i, end in enumerate(ends)]
    pages, tables = cache_of([row], 32, seed=0)
    assert_shared_changes_nothing(instruction_set, rows, pages, np.repeat(tables, len(rows), axis=0))


def test_each_shares_more_with_the_one_before(instruction_set: str) -> None:
    """A tree as deep as it gets: one level for every row."""
    rows, pages, tables = grow([Branch(max(0, i - 1), 128 * i, 130) for i in range(8)], (4, 2, 32), 32)
    assert_shared_changes_nothing(instruction_set, rows, pages, tables)
    order = np.random.default_rng(0).permutation(len(rows))
    assert_shared_changes_nothing(instruction_set, [rows[i] for i in order], pages, tables[order])


def test_a_long_history_behind_a_prefix_is_cut(instruction_set: str) -> None:
    """Two rows keep several threads busy: what they share is cut by heads, what they do not by tiles."""
    for owns in [(1000, 1300), (1, 1000), (1, 1)]:
        rows, pages, tables = grow([Branch(0, 300, own) for own in owns], (4, 4, 32), 32)
        assert_shared_changes_nothing(instruction_set, rows, pages, tables)


def test_prompts_beside_rows_that_share(instruction_set: str) -> None:
    branches = [
        Branch(0, 260, own, queries) for own, queries in [(1, 1), (200, 150), (90, 4), (33, 33), (7, 1), (40, 5)]
    ]
    assert_shared_changes_nothing(
        instruction_set, *grow([*branches, Branch(6, 0, 300, 300), Branch(6, 300, 1)], (4, 2, 64), 64)
    )


def test_a_shared_block_that_is_not_a_number_reaches_only_those_who_share_it(instruction_set: str) -> None:
    rows, pages, tables = grow(
        [Branch(0, 256, 20), Branch(0, 256, 30), Branch(2, 0, 300), Branch(2, 256, 9)], (4, 2, 32), 32
    )
    pages[tables[0, 3], :, 0] = narrow(np.full(1, np.nan, np.float32))
    for threads in THREADS:
        found = attend_to(engine_of(instruction_set, threads), rows, pages, tables)
        assert [bool(np.isnan(result).any()) for result in found] == [True, True, False, False]


@st.composite
def forests(draw: st.DrawFn) -> list[Branch]:
    """Up to a dozen rows, each a branch of one before or a tree of its own."""
    count = draw(st.integers(2, 12))
    common, own = st.integers(0, 700), st.integers(1, 300)
    queries = st.one_of(st.just(1), st.integers(1, 4), st.integers(1, 60))
    return [Branch(draw(st.integers(0, i)), draw(common), draw(own), draw(queries)) for i in range(count)]


@examples(15)
@given(
    branches=forests(),
    size=st.sampled_from([32, 64, 96, 128]),
    shape=st.sampled_from([(1, 1, 32), (4, 2, 64), (5, 1, 32), (8, 8, 32), (8, 1, 32)]),
    seed=st.integers(0, 1000),
)
def test_any_forest(branches: list[Branch], size: int, shape: Shape, seed: int, instruction_set: str) -> None:
    assert_shared_changes_nothing(instruction_set, *grow(branches, shape, size, seed))


def test_results_that_waited_in_one_step_are_gone_in_the_next(instruction_set: str) -> None:
    """One recording's memory, steps of other trees."""
    rows, pages, tables = grow([Branch(0, 384, 1 + 60 * i) for i in range(6)], (4, 2, 32), 32)
    alone = attend(engine_of(instruction_set), rows)
    stage = Stage(engine_of(instruction_set, 2))
    queries, out = stage.room(np.uint16, 3, 4, 32), stage.strip_room(3, 128)
    stage.record.paged_attention(queries, KVCacheLayer(pages, LAYER, 32), out)
    for chosen in ([0, 1, 2], [3, 4, 5], [5], [0, 5], [2, 3, 1]):
        count = len(chosen)
        queries[:count] = narrow(np.concatenate([rows[i].queries for i in chosen]))
        stage.play(count, lengths=[(rows[i].first, 1) for i in chosen], tables=int32(tables[chosen]))
        found = stage.rows(out[: count * 64], count, 128).reshape(count, 4, 32)
        assert all(np.array_equal(found[place], alone[i][0]) for place, i in enumerate(chosen))
