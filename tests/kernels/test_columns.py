"""Operations that compute a part, as a rank does: the bits of the whole in its columns, and nothing beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pypto_serving.kernels import (
    Engine,
    KVCacheLayer,
    Matrix,
    MlaSizes,
    NormRopeParams,
    Recording,
    Scoring,
    StripColumns,
)
from tests.kernels.attention_rows import LAYER, cache_of, random_row
from tests.kernels.layouts import Array, interleaved, narrow, random_bf16, to_panels
from tests.kernels.paged import Blocks, Rows, angles, to_query_panels
from tests.kernels.stage import Stage, int32, matrix_of

pytestmark = pytest.mark.thinned(2)

K, TOKENS = 34, 37
PARTS = {"halves": [range(0, 32), range(32, 80)], "ends": [range(0, 16), range(64, 80)]}
UNTOUCHED = 0xFFFFFFFF

Write = Callable[[Recording, range, Any], None]


def assert_parts(engine: Engine, strips: list[Array], width: int, parts: list[range], write: Write) -> None:
    """Compare the strips [tokens, width] that parts write with those of the whole, and what lies between them."""
    outs = []
    for outputs in ([range(width)], parts):
        stage = Stage(engine)
        out = stage.room(np.uint32, TOKENS * width // 2)
        x = stage.copy(np.concatenate(strips))
        for part in outputs:
            write(stage.record, part, (x, StripColumns(out, width, part.start)))
        stage.play(TOKENS)
        outs.append(stage.rows(out, TOKENS, width).view(np.uint32))
    whole, found = outs
    written = [column for part in parts for column in part]
    assert np.array_equal(found[:, written], whole[:, written])
    between = np.delete(found, written, axis=1)
    assert np.isnan(between.view(np.float32)).all()


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_swiglu(engine: Engine, parts: list[range], apart: bool) -> None:
    rng = np.random.default_rng(0)
    gate, up = random_bf16(rng, 80, K), random_bf16(rng, 80, K)

    def write(record: Recording, part: range, room: Any) -> None:
        (x, out), rows = room, slice(part.start, part.stop)
        if not apart:
            return record.linear_swiglu(x, matrix_of(interleaved(gate[rows], up[rows])), out)
        gates = np.zeros((TOKENS, len(part)), np.float32)
        record.linear(x, matrix_of(gate[rows]), gates)
        record.linear_swiglu(x, matrix_of(up[rows]), out, gates=gates)

    assert_parts(engine, [Stage(engine).strips(random_bf16(rng, TOKENS, K))], 80, parts, write)


def test_groups(engine: Engine) -> None:
    """Parts begin and end within groups."""
    rng = np.random.default_rng(0)
    weights = random_bf16(rng, 192, K)

    def write(record: Recording, part: range, room: Any) -> None:
        record.linear_groups(room[0], matrix_of(weights[part.start : part.stop]), 64, room[1])

    strips = [Stage(engine).strips(x) for x in random_bf16(rng, 3, TOKENS, K)]
    assert_parts(engine, strips, 192, [range(32, 160), range(160, 192)], write)


@pytest.mark.parametrize("parts", [[(range(0, 4), range(1)), (range(4, 8), range(1, 2))], [(range(5, 7), range(1, 2))]])
def test_heads(engine: Engine, parts: list[tuple[range, range]]) -> None:
    """Heads with their kv heads, and some of those that share one."""
    rows = [random_row(0, 200, 3, 8, 2, 32), random_row(1, 0, 40, 8, 2, 32)]
    (pages, tables), tokens, outs = cache_of(rows, 32, 0), 43, []
    queries = narrow(np.concatenate([row.queries for row in rows]))
    for work in ([(range(8), range(2))], parts):
        stage = Stage(engine)
        out = stage.strip_room(tokens, 256)
        for heads, kv_heads in work:
            mine = np.ascontiguousarray(queries[:, heads.start : heads.stop])
            columns = StripColumns(out, 256, 32 * heads.start)
            stage.record = Recording(engine)  # one plan has one shape of heads
            stage.record.paged_attention(mine, KVCacheLayer(pages, LAYER, 32, kv_heads), columns)
            stage.play(tokens, lengths=[(200, 3), (0, 40)], tables=int32(tables))
        outs.append(stage.rows(out, tokens, 256).reshape(tokens, 8, 32))
    for heads, _ in parts:
        assert np.array_equal(outs[1][:, heads.start : heads.stop], outs[0][:, heads.start : heads.stop])
    assert np.isnan(outs[1]).sum() == tokens * 32 * (8 - sum(len(heads) for heads, _ in parts))


@pytest.mark.parametrize("packed", [False, True])
def test_embeddings_of_some_tokens(engine: Engine, packed: bool) -> None:
    table, ids = random_bf16(np.random.default_rng(0), 40, 34), np.array([31, 32, 0, 71, 72, 50])
    stage = Stage(engine)
    x = stage.room(np.float32, len(ids), 34)
    if packed:
        stage.record.embed(matrix_of(table), x, 32)
    else:
        stage.record.embed(narrow(table), x, 32)
    stage.play(len(ids), token_ids=ids)
    known = (ids >= 32) & (ids < 72)
    assert np.array_equal(x[known], table[ids[known] - 32])
    assert np.isnan(x[~known]).all()


def packed_experts(weights: Array) -> Matrix:
    return Matrix(np.concatenate([to_panels(w) for w in weights]), *weights.shape[1:])


def expert_outputs(engine: Engine, computed: range, inner: range, outer: range) -> tuple[Array, Array]:
    """Run two columns of experts' gated rows, and of their sum."""
    rng = np.random.default_rng(0)
    gate, up, down = (random_bf16(rng, 6, *shape, scale=0.2) for shape in ((48, K), (48, K), (K, 48)))
    logits, x = rng.standard_normal((TOKENS, 6), np.float32), random_bf16(rng, TOKENS, K)
    stage, entries = Stage(engine), TOKENS * 2
    rows, gated, y = stage.strip_room(entries, K), stage.strip_room(entries, 48), stage.room(np.float32, entries, K)
    out = stage.copy(np.zeros((TOKENS, K), np.float32))
    routing = stage.record.route(logits, 2, Scoring.RENORMALIZED, computed=computed)
    stage.record.moe_gather(routing, stage.strips(x), K, rows)
    mine, i, o = slice(computed.start, computed.stop), slice(inner.start, inner.stop), slice(outer.start, outer.stop)
    both = [interleaved(g, u) for g, u in zip(gate[mine, i], up[mine, i], strict=True)]
    stage.record.linear_swiglu(
        rows, packed_experts(np.stack(both)), StripColumns(gated, 48, inner.start), routing=routing
    )
    whole = stage.copy(np.zeros(entries * 24, np.uint32))
    stage.record.linear(whole, packed_experts(down[mine, o]), y[:, o], routing=routing)
    stage.record.moe_combine(routing, np.ones_like(y)[:, o], out[:, o])
    stage.play(TOKENS)
    return gated, np.concatenate([y.ravel(), out.ravel()])


def test_experts(engine: Engine) -> None:
    """Some columns of some experts; the rest is left as it is."""
    gated, others = expert_outputs(engine, range(6), range(48), range(K))
    parts = [(range(0, 2), range(0, 16)), (range(0, 2), range(16, 48)), (range(2, 6), range(48))]
    found = [expert_outputs(engine, computed, inner, range(0, 32))[0] for computed, inner in parts]
    joined = np.full_like(gated, UNTOUCHED)
    for words in found:
        assert (joined[words != UNTOUCHED] == UNTOUCHED).all()
        joined = np.where(words != UNTOUCHED, words, joined)
    assert np.array_equal(joined, gated)
    part = expert_outputs(engine, range(6), range(48), range(32, K))[1].reshape(-1, K)
    assert np.array_equal(part[:, 32:], others.reshape(-1, K)[:, 32:])
    assert np.isnan(part[: 2 * TOKENS, :32]).all() and (part[2 * TOKENS :, :32] == 0).all()


def test_streams_and_routers(engine: Engine) -> None:
    rng, outs = np.random.default_rng(0), []
    x, y = rng.standard_normal((TOKENS, 4, 48), np.float32), rng.standard_normal((TOKENS, 48), np.float32)
    weight, post_comb = rng.standard_normal((8, 192), np.float32), rng.standard_normal((TOKENS, 20), np.float32)
    for parts in ([(slice(0, 48), slice(0, 8))], [(slice(0, 32), slice(0, 4)), (slice(32, 48), slice(4, 8))]):
        stage = Stage(engine)
        streams, logits = stage.copy(x), stage.room(np.float32, TOKENS, 8)
        for columns, outputs in parts:
            stage.record.rms_norm_linear(x, weight[outputs], 1e-6, logits[:, outputs])
            stage.record.hyper_connection_post(y[:, columns].copy(), post_comb, streams[:, :, columns])
        stage.play(TOKENS)
        outs.append((streams, logits))
    assert all(np.array_equal(*pair) for pair in zip(*outs, strict=True))


@pytest.mark.parametrize("split", [4, 10])
def test_heads_of_latents(engine: Engine, split: int) -> None:
    """Panels from some head on, and attention in groups of 10 heads."""
    rng, (cos, sin) = np.random.default_rng(0), angles(300, 16)
    blocks = Blocks([Rows(64, size=32)], [(100, 3)])
    blocks.fill(0, 0, random_bf16(rng, 103, 64))
    x, queries = rng.standard_normal((3, 40 * 64), np.float32), random_bf16(rng, 3, 40, 64)
    sinks, rope, outs = np.zeros(64, np.float32), NormRopeParams(dim=64, cos=cos, sin=sin, eps=1e-6), []
    for parts in ([range(40)], [range(split), range(split, 40)]):
        stage = Stage(engine)
        panels, out = stage.copy(np.zeros((3, 2, 32, 32), np.uint32)), stage.strip_room(3, 40 * 64)
        pages = blocks.pages(stage, 0)
        for part in parts:
            mine = slice(part.start, part.stop)
            stage.record.norm_rope(x[:, part.start * 64 : part.stop * 64], len(part), rope, panels, part.start)
            sizes = MlaSizes(part, 128, 10)
            stage.record.mla_attention(to_query_panels(queries[:, mine]), sinks, rope, sizes, pages, out)
        blocks.play(stage)
        outs.append((panels, out))
    assert all(np.array_equal(*pair) for pair in zip(*outs, strict=True))


def test_parts_that_are_not_within_the_whole(engine: Engine) -> None:
    stage, matrix = Stage(engine), matrix_of(np.zeros((64, 32), np.float32))
    x, out = stage.strip_room(1, 32), stage.strip_room(1, 96)
    for first in (-2, 65, 66):
        with pytest.raises(ValueError, match=f"32 columns from {first} on are not within strips of 96"):
            stage.record.linear_swiglu(x, matrix, StripColumns(out, 96, first))
    with pytest.raises(ValueError, match="whole panels"):
        stage.record.linear_groups(x, matrix, 32, StripColumns(out, 96, 16))
    rope = NormRopeParams(dim=32, cos=np.zeros((1, 8), np.float32), sin=np.zeros((1, 8), np.float32))
    with pytest.raises(ValueError, match="4 heads from 30 on are not within 1 panels"):
        stage.record.norm_rope(np.zeros((1, 128), np.float32), 4, rope, np.zeros((1, 1, 16, 32), np.uint32), 30)
