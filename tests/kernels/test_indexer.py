"""The indexer: scores of compressed entries, and the best of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from pypto_serving.kernels import INDEXER_TOKENS, Engine, NormRopeParams
from tests.kernels.layouts import Array, random_bf16
from tests.kernels.paged import Blocks, Rows, angles, to_query_panels
from tests.kernels.references import double
from tests.kernels.stage import Stage, engine_of

pytestmark = pytest.mark.thinned(2)

SCALE = 0.25
LENGTHS = [(0, 40), (399, 1), (2999, 1), (200, 70), (30, 2)]


@dataclass(frozen=True)
class Work:
    """Queries [t, heads, dim], their weights [t, heads], and the keys of each sequence."""

    lengths: list[tuple[int, int]]
    queries: Array
    weights: Array
    keys: list[Array]
    top: int
    ratio: int = 4


def make_work(heads: int, dim: int, top: int, lengths: list[tuple[int, int]] = LENGTHS) -> Work:
    rng = np.random.default_rng(heads)
    tokens = sum(count for _, count in lengths)
    keys = [random_bf16(rng, (first + count) // 4, dim) for first, count in lengths]
    weights = rng.standard_normal((tokens, heads), np.float32)
    return Work(lengths, random_bf16(rng, tokens, heads, dim), weights, keys, top)


def choose(engine: Engine, work: Work, parts: int = 1) -> Array:
    """Entries [tokens, top], -1 where all are known; computed in parts of the tokens."""
    stage, (tokens, heads, dim) = Stage(engine), work.queries.shape
    blocks = Blocks([Rows(8), Rows(dim, size=32, ratio=work.ratio)], work.lengths)
    for row, keys in enumerate(work.keys):
        blocks.fill(1, row, keys)
    indices = stage.room(np.int32, tokens, work.top)
    weights = np.full((tokens, heads + 5), np.nan, np.float32)
    weights[:, 3:-2] = work.weights
    rope, most = NormRopeParams(dim=dim, cos=angles(1, 8)[0], sin=angles(1, 8)[1]), max(map(len, work.keys))
    pages = blocks.pages(stage, 1)
    queries = to_query_panels(work.queries)
    scores = stage.room(np.float32, INDEXER_TOKENS, most)
    for part in range(parts):
        inputs = (queries, weights[:, 3:-2], SCALE, rope, pages)
        stage.record.indexer_topk(*inputs, indices, scores, part, parts)
    blocks.play(stage)
    return indices


def scores(work: Work) -> list[Array]:
    """Float64 scores of what each token knows."""
    found, token = [], 0
    for row, (first, count) in enumerate(work.lengths):
        for p in range(first, first + count):
            products = np.maximum(0, double(work.queries[token]) @ double(work.keys[row][: (p + 1) // work.ratio]).T)
            found.append(SCALE * double(work.weights[token]) @ products)
            token += 1
    return found


@pytest.mark.parametrize(("heads", "dim", "top"), [(64, 128, 50), (4, 32, 8), (40, 64, 512), (33, 96, 1)])
def test_the_best_entries(engine: Engine, heads: int, dim: int, top: int) -> None:
    """Where rounding may have changed the order, scores at the edge are close."""
    work = make_work(heads, dim, top)
    for mine, score in zip(choose(engine, work), scores(work), strict=True):
        if len(score) <= top:
            assert (mine == -1).all()
            continue
        assert (np.diff(mine) > 0).all() and mine[0] >= 0 and mine[-1] < len(score)
        others = np.delete(score, mine)
        assert score[mine].min() >= others.max() - 1e-4 * np.abs(score).max()


@pytest.mark.parametrize("level", [0.0, -0.0, -3.0])
def test_ties_go_to_the_lower_entry(engine: Engine, level: float) -> None:
    """Entries that no query meets have the score zero, whatever its sign; equal keys have equal scores."""
    work = make_work(4, 32, 20, [(799, 1)])
    work.weights[:] = 1 if level == 0 else level
    work.queries[:] = np.abs(work.queries)
    work.keys[0][:] = -1
    if level:
        work.keys[0][:] = 1
    work.keys[0][[7, 150]] = 2 if level == 0 else 0
    wanted = np.sort(np.concatenate([[7, 150], np.delete(np.arange(200), [7, 150])[:18]]))
    assert np.array_equal(choose(engine, work)[0], wanted)


def test_a_token_is_the_same_in_every_company(instruction_set: str) -> None:
    work = make_work(40, 64, 30)
    whole, begin = choose(engine_of(instruction_set), work), 0
    for row, (first, count) in enumerate(work.lengths):
        mine = slice(begin, begin + count)
        part = Work([(first, count)], work.queries[mine], work.weights[mine], [work.keys[row]], work.top)
        for threads in (1, 2, 3, 5):
            assert np.array_equal(choose(engine_of(instruction_set, threads), part), whole[mine])
        begin += count


def test_parts_of_the_tokens(engine: Engine) -> None:
    work = make_work(4, 32, 8, [(399, 1), (200, 40), (30, 2)])
    assert np.array_equal(choose(engine, work, parts=3), choose(engine, work))
    one = make_work(4, 32, 8, [(399, 1)])
    assert np.array_equal(choose(engine, one, parts=2), choose(engine, one))
