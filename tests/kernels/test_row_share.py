"""Ranks that share the rows of a step: whole rows, in order, all of them, about the same work."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pypto_serving.kernels import Recording, runnable
from tests.kernels.stage import engine_of, int32
from tests.needs import needs_kernels

pytestmark = needs_kernels

WIDTH, TOKEN_COST = 4, 100
ROWS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 400)), min_size=1, max_size=12)
"""Tokens to compute of each row, and tokens before them."""


def shares_of(rows: list[tuple[int, int]], ranks: int) -> list[np.ndarray]:
    """The rows of activations that each rank takes."""
    counts, before = np.transpose(rows)
    starts, tokens = int32([0, *counts.cumsum()]), int(counts.sum())
    x = np.repeat(np.arange(1, tokens + 1, dtype=np.float32)[:, None], WIDTH, axis=1)
    found, every = [], int32(np.arange(tokens))
    for rank in range(ranks):
        step, mine = Recording(engine_of(runnable()[0])), np.zeros_like(x)
        with step.share_of_rows(rank, ranks, TOKEN_COST, x, mine):
            pass
        arrays = (every, every, starts, int32(counts + before), every[:1])
        step.replay(*arrays, [every], [int32(np.zeros((len(rows), 1)))])
        found.append(mine[: np.count_nonzero(mine[:, 0])])
    return found


@given(ROWS, st.integers(2, 5))
def test_shares_are_whole_rows_of_about_the_same_work(rows: list[tuple[int, int]], ranks: int) -> None:
    shares = shares_of(rows, ranks)
    tokens = np.concatenate(shares)[:, 0] - 1
    assert np.array_equal(tokens, np.arange(sum(count for count, _ in rows)))
    ends = np.cumsum([count for count, _ in rows])
    costs = np.array([count * (TOKEN_COST + count + before) for count, before in rows])
    row_of = np.searchsorted(ends, tokens, side="right")
    owners = [
        set(row_of[start : start + len(share)])
        for start, share in zip(np.cumsum([0, *map(len, shares)]), shares, strict=False)
    ]
    assert sum(map(len, owners)) == len(rows)
    for owner in owners:
        assert sum(costs[row] for row in owner) <= costs.sum() / ranks + costs.max()


def test_a_rank_may_have_no_row() -> None:
    assert sorted(map(len, shares_of([(5, 0)], 3))) == [0, 0, 5]
