"""From a projection to queries, and to keys and values in the cache."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pypto_serving.kernels import Engine, KVCacheLayer
from tests.kernels import references
from tests.kernels.heads import EPS, LAYER, LAYERS, SHAPES, STEPS, Shape, Work, make_work
from tests.kernels.layouts import NAN, Array, keys_of, narrow, values_of, widen
from tests.kernels.references import BFLOAT16, assert_close, rotate
from tests.kernels.stage import Stage, engine_of

pytestmark = pytest.mark.thinned(2)


def heads(engine: Engine, work: Work) -> tuple[Array, Array]:
    """Queries [tokens, heads, dim] and pages uint16 [blocks, layers, 2, kv_heads, size * dim], NaN where unwritten."""
    shape, tokens, stage = work.shape, len(work.x), Stage(engine)
    pages = stage.room(np.uint16, work.num_blocks, LAYERS, 2, shape.kv_heads, shape.size * shape.dim)
    pages[...] = NAN
    queries = stage.room(np.uint16, tokens, shape.heads, shape.dim)
    cache = KVCacheLayer(pages, LAYER, shape.dim)
    stage.record.qk_norm_rope(work.x, work.weights, work.cos, work.sin, EPS, queries, cache, work.query_tables)
    stage.play(tokens, lengths=work.lengths, slots=work.slots)
    return widen(queries), pages


@pytest.mark.thinned(1)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("lengths", STEPS, ids=["one", "prompt", "mixed", "decodes", "chunks"])
def test_queries_keys_and_values(engine: Engine, shape: Shape, lengths: list[tuple[int, int]]) -> None:
    work = make_work(shape, lengths)
    queries, pages = heads(engine, work)
    cos, sin = work.cos[work.positions], work.sin[work.positions]
    turning = work.x[:, : shape.heads + shape.kv_heads]
    normed = references.norm(turning, work.weights, EPS)
    wanted, most = rotate(normed, cos, sin), rotate(np.abs(normed), np.abs(cos), np.abs(sin)).max()
    if work.query_tables:
        wanted[:, : shape.heads, : shape.rotated] *= 2
        most *= 2
    error = 1.01 * BFLOAT16 * np.abs(wanted) + 1e-6 * most
    assert_close(queries, wanted[:, : shape.heads], error[:, : shape.heads])

    block, offset = work.slots // shape.size, work.slots % shape.size
    keys = widen(keys_of(pages[:, LAYER, 0], shape.dim)[block, :, offset])
    values = values_of(pages[:, LAYER, 1], shape.dim)[block, :, offset]
    assert_close(keys, wanted[:, shape.heads :], error[:, shape.heads :])
    assert np.array_equal(values, narrow(work.x[:, shape.heads + shape.kv_heads :]))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nothing_else_is_written(engine: Engine, shape: Shape) -> None:
    """Of the cache, only the tokens' slots change, and the other half of a row's last pair of values becomes zero."""
    work = make_work(shape, [(31, 1), (0, 17), (126, 5), (8, 1), (0, 2)])
    _, pages = heads(engine, work)
    keys, values = keys_of(pages[:, LAYER, 0], shape.dim), values_of(pages[:, LAYER, 1], shape.dim)
    written = np.zeros((work.num_blocks, shape.size), bool)
    written[work.slots // shape.size, work.slots % shape.size] = True
    assert np.array_equal((keys != NAN).all((1, 3)), written) and np.array_equal((keys != NAN).any((1, 3)), written)

    ends = np.cumsum([count for _, count in work.lengths]) - 1
    lone = work.slots[ends][work.slots[ends] % 2 == 0] + 1
    assert (values[lone // shape.size, :, lone % shape.size] == 0).all()
    written[lone // shape.size, lone % shape.size] = True
    assert np.array_equal((values != NAN).any((1, 3)), written)
    assert (pages[:, np.arange(LAYERS) != LAYER] == NAN).all()


def test_a_token_is_the_same_in_every_company(instruction_set: str) -> None:
    work = make_work(Shape(8, 4, 128, 64), [(0, 50)])
    whole = heads(engine_of(instruction_set), work)[0]
    for threads in (1, 2, 3, 5):
        for begin, end in [(0, 50), (0, 1), (7, 9), (20, 33)]:
            part = replace(work, lengths=[(begin, end - begin)], x=work.x[begin:end])
            assert np.array_equal(heads(engine_of(instruction_set, threads), part)[0], whole[begin:end])
