"""Attention over an int8 KV cache: what test_attention.py does not ask of every cache."""

from __future__ import annotations

import numpy as np
import pytest

from pypto_serving.kernels import Engine, KVCacheLayer, runnable
from tests.kernels import references
from tests.kernels.attention_rows import Row, random_row
from tests.kernels.heads import EPS, LAYER, LAYERS, STEPS, Work, make_work
from tests.kernels.heads import SHAPES as HEADS
from tests.kernels.heads import Shape as HeadShape
from tests.kernels.int8_pages import INT8_KV, from_panels, meaning
from tests.kernels.layouts import Array
from tests.kernels.references import assert_close, rotate
from tests.kernels.stage import Stage, engine_of

pytestmark = pytest.mark.thinned(2)

attend = INT8_KV.attend


@pytest.mark.parametrize("scale", [2.0**-80, 2.0**-9, 2.0**20])
def test_values_of_any_size(engine: Engine, scale: float) -> None:
    row = random_row(0, 200, 5, 4, 2, 64)
    wanted = attend(engine, [row])[0]
    grown = Row(row.first, row.queries, row.keys, row.values * np.float32(scale))
    assert np.array_equal(attend(engine, [grown])[0], wanted * np.float32(scale))


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
    stage.record.qk_norm_rope(work.x, work.weights, work.cos, work.sin, EPS, queries, cache, work.query_tables)
    stage.play(len(work.x), lengths=work.lengths, slots=work.slots)
    return pages


@pytest.mark.thinned(1)
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
