"""Latents: rotated into queries and rows of pages, compressed, and attended to."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from pypto_serving.kernels import Engine, MlaSizes, NormRopeParams
from tests.kernels.layouts import Array, random_bf16
from tests.kernels.paged import Blocks, Rows, angles, from_query_panels, rotate_pairs, to_query_panels
from tests.kernels.references import BFLOAT16, assert_close, double, norm
from tests.kernels.stage import Stage, engine_of

pytestmark = pytest.mark.thinned(2)

EPS = 1e-6
STEPS = {
    "one": [(0, 1)],
    "prompt": [(0, 50)],
    "mixed": [(31, 1), (0, 17), (126, 5), (7, 1)],
    "decodes": [(p, 1) for p in range(20)],
    "chunks": [(250, 13), (0, 70)],
}
lengths_of_steps = pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS.keys())


@pytest.mark.thinned(1)
@lengths_of_steps
@pytest.mark.parametrize("shape", [(1, 32, 16), (40, 64, 32), (64, 128, 64)], ids=str)
def test_queries(engine: Engine, lengths: list[tuple[int, int]], shape: tuple[int, int, int]) -> None:
    """Heads are normalised without a weight, scaled and rotated; x is a part of wider rows."""
    (heads, dim, rope_dim), blocks = shape, Blocks([Rows(8)], lengths)
    (cos, sin), tokens, stage = angles(300, rope_dim // 2), len(blocks.positions), Stage(engine)
    x = np.random.default_rng(0).standard_normal((tokens, heads * dim + 48), np.float32)[:, 48:]
    out = stage.room(np.uint32, tokens, -(-heads // 32), dim // 2, 32)
    stage.record.norm_rope(x, heads, NormRopeParams(dim=dim, cos=cos, sin=sin, eps=EPS, scale=0.3), out)
    blocks.play(stage)
    wanted = norm(x.reshape(tokens, heads, dim), np.full(dim, 0.3), EPS)
    wanted = rotate_pairs(wanted, cos[blocks.positions], sin[blocks.positions])
    assert_close(from_query_panels(out, heads), wanted, 1.01 * BFLOAT16 * np.abs(wanted) + 1e-6)


@lengths_of_steps
def test_rows_of_pages(engine: Engine, lengths: list[tuple[int, int]]) -> None:
    dim, rng, stage = 64, np.random.default_rng(0), Stage(engine)
    blocks = Blocks([Rows(8), Rows(dim, size=32)], lengths)
    (cos, sin), positions = angles(300, 16), blocks.positions
    x, weight = rng.standard_normal((len(positions), dim), np.float32), rng.uniform(0.5, 2, dim).astype(np.float32)
    pages = blocks.pages(stage, 1)
    stage.record.norm_rope(x, 1, NormRopeParams(dim=dim, cos=cos, sin=sin, eps=EPS, weight=weight), pages)
    blocks.play(stage)
    wanted = rotate_pairs(norm(x, weight, EPS), cos[positions], sin[positions])
    begin = 0
    for row, (first, count) in enumerate(lengths):
        mine = wanted[begin : begin + count]
        found = blocks.read(1, row, np.arange(first, first + count))
        assert_close(found, mine, 1.01 * BFLOAT16 * np.abs(mine) + 1e-6)
        begin += count
    assert np.isfinite(blocks.read(1, 0, blocks.positions[:1])).all()
    written = (blocks.arenas[1] != 0xFFFF).any(-1)
    assert written.sum() == len(positions)


@lengths_of_steps
def test_rows_of_the_tokens_before(engine: Engine, lengths: list[tuple[int, int]]) -> None:
    """Those of this step and of earlier ones; there are none before position 0."""
    width, rng, stage = 64, np.random.default_rng(0), Stage(engine)
    blocks = Blocks([Rows(width, size=16, dtype=np.float32)], lengths)
    sequences = [rng.standard_normal((first + count, width), np.float32) for first, count in lengths]
    for row, sequence in enumerate(sequences):
        blocks.fill(0, row, sequence[: lengths[row][0]])
    x = np.concatenate([s[first:] for s, (first, _) in zip(sequences, lengths, strict=True)])
    found, pages = stage.room(np.float32, len(x), width), blocks.pages(stage, 0)
    stage.record.store_rows(x, pages)
    stage.record.previous_rows(pages, found)
    blocks.play(stage)
    before = [
        np.concatenate([np.zeros((1, width)), s])[first:-1] for s, (first, _) in zip(sequences, lengths, strict=True)
    ]
    assert np.array_equal(found, np.concatenate(before))


@dataclass(frozen=True)
class Compressor:
    """Entries of `dim` from `ratio` tokens, with those before where they overlap."""

    ratio: int
    dim: int = 32
    overlaps: bool = False

    @property
    def width(self) -> int:
        return 2 * self.dim if self.overlaps else self.dim


def entries_of(c: Compressor, values: Array, gates: Array) -> Array:
    """Float64 means of all whole windows of states [n, width]."""
    entries = []
    for end in range(c.ratio, len(values) + 1, c.ratio):
        v, g = double(values[end - c.ratio : end, -c.dim :]), double(gates[end - c.ratio : end, -c.dim :])
        if c.overlaps and end > c.ratio:
            before = slice(end - 2 * c.ratio, end - c.ratio)
            v, g = np.concatenate([values[before, : c.dim], v]), np.concatenate([gates[before, : c.dim], g])
        weights = np.exp(g - g.max(0))
        entries.append((weights * v).sum(0) / weights.sum(0))
    return np.array(entries)


@pytest.mark.parametrize("c", [Compressor(4, overlaps=True), Compressor(16), Compressor(128, 64)], ids=str)
def test_compressed_entries(engine: Engine, c: Compressor) -> None:
    """Chunks of any size write states, and an entry when its last token comes."""
    rng, stage, length = np.random.default_rng(0), Stage(engine), 300
    groups = [Rows(2 * c.width, size=4, dtype=np.float32), Rows(c.dim, size=c.ratio * 2, ratio=c.ratio)]
    (cos, sin), weight = angles(300, 8), rng.uniform(0.5, 2, c.dim).astype(np.float32)
    everything = rng.standard_normal((length, 2 * c.width), np.float32) * 2
    position = rng.standard_normal((c.ratio, c.width), np.float32)
    projected = stage.room(np.float32, length, 2 * c.width)
    blocks = Blocks(groups, [(0, length)])
    state, entries = blocks.pages(stage, 0), blocks.pages(stage, 1)
    stage.record.compressor_state(projected[:, : c.width], projected[:, c.width :], position, state)
    stage.record.compress(state, c.width, NormRopeParams(dim=c.dim, cos=cos, sin=sin, eps=EPS, weight=weight), entries)
    for begin, end in [(0, 1), (1, 7), (7, 8), (8, 100), (100, 101), (101, 300)]:
        projected[: end - begin] = everything[begin:end]
        blocks.lengths[:] = [(begin, end - begin)]
        blocks.play(stage)
    gates = everything[:, c.width :] + np.tile(position, (-(-length // c.ratio), 1))[:length]
    starts = np.arange(length // c.ratio) * c.ratio
    wanted = norm(entries_of(c, everything[:, : c.width], gates), weight, EPS)
    wanted = rotate_pairs(wanted, cos[starts], sin[starts])
    assert_close(blocks.read(1, 0, starts), wanted, 1.01 * BFLOAT16 * np.abs(wanted) + 1e-5)


@dataclass(frozen=True)
class Shape:
    heads: int
    dim: int
    rope_dim: int
    window: int
    groups: int = 1
    ratio: int = 4
    top: int = 0  # none chosen
    begin: int = 0


SHAPES = [
    Shape(4, 32, 16, 16, 2, top=8),
    Shape(64, 512, 64, 128, 8, top=40),
    Shape(40, 96, 32, 128, 4, 16),
    Shape(33, 64, 64, 20, 3, 0),
    Shape(4, 32, 16, 16, 2, 0, begin=1),
]


@dataclass(frozen=True)
class Work:
    """Queries of a step, all rows of its sequences, entries, and which of them are chosen."""

    shape: Shape
    lengths: list[tuple[int, int]]
    queries: Array
    sinks: Array
    rows: list[Array]
    entries: list[Array]
    chosen: Array
    cos: Array
    sin: Array


def make_work(shape: Shape, lengths: list[tuple[int, int]], seed: int = 0) -> Work:
    rng = np.random.default_rng(seed)
    tokens = sum(count for _, count in lengths)
    ends = [first + count for first, count in lengths]
    positions = np.concatenate([np.arange(first, first + count) for first, count in lengths])
    chosen = np.zeros((tokens, max(1, shape.top)), np.int32)
    for mine, position in zip(chosen, positions, strict=True):
        known = (position + 1) // shape.ratio if shape.ratio else 0
        if known > shape.top > 0:
            mine[:] = np.sort(rng.permutation(known)[: shape.top])
    return Work(
        shape,
        lengths,
        queries=random_bf16(rng, tokens, shape.heads, shape.dim, scale=shape.dim**-0.5),
        sinks=rng.standard_normal(-(-shape.heads // 32) * 32).astype(np.float32),
        rows=[random_bf16(rng, end, shape.dim) for end in ends],
        entries=[random_bf16(rng, end // shape.ratio if shape.ratio else 0, shape.dim) for end in ends],
        chosen=chosen,
        cos=(table := angles(400, shape.rope_dim // 2))[0],
        sin=table[1],
    )


def attend(engine: Engine, work: Work) -> Array:
    """What comes out, [tokens, heads, dim]."""
    shape, stage, tokens = work.shape, Stage(engine), len(work.queries)
    groups = [Rows(shape.dim, size=32), *[Rows(shape.dim, size=32, ratio=shape.ratio)] * bool(shape.ratio)]
    blocks = Blocks(groups, work.lengths)
    for row, (rows, entries) in enumerate(zip(work.rows, work.entries, strict=True)):
        blocks.fill(0, row, rows)
        if shape.ratio:
            blocks.fill(1, row, entries)
    strips = stage.strip_room(tokens, shape.heads * shape.dim)
    stage.record.mla_attention(
        to_query_panels(work.queries),
        work.sinks,
        NormRopeParams(dim=shape.dim, cos=work.cos, sin=work.sin),
        MlaSizes(range(shape.heads), shape.window, shape.heads // shape.groups, shape.begin),
        blocks.pages(stage, 0),
        strips,
        blocks.pages(stage, 1) if shape.ratio else None,
        work.chosen if shape.top else None,
    )
    blocks.play(stage)
    width = shape.heads * shape.dim // shape.groups
    parts = [stage.rows(part, tokens, width) for part in np.split(strips, shape.groups)]
    return np.concatenate(parts, axis=1).reshape(tokens, shape.heads, shape.dim)


def wanted_of(work: Work) -> Array:
    shape, out, token = work.shape, np.zeros(work.queries.shape), 0
    for row, (first, count) in enumerate(work.lengths):
        for p in range(first, first + count):
            seen = [work.rows[row][max(shape.begin, p + 1 - shape.window) : p + 1]]
            known = (p + 1) // shape.ratio if shape.ratio else 0
            cut = shape.top and known > shape.top
            seen.append(work.entries[row][work.chosen[token] if cut else slice(known)])
            keys = double(np.concatenate(seen))
            scores = double(work.queries[token]) @ keys.T
            weights = np.exp2(scores)
            mass = weights.sum(-1) + np.exp2(double(work.sinks[: shape.heads]))
            mixed = (weights / mass[:, None] @ keys)[None]
            out[token] = rotate_pairs(mixed, work.cos[p : p + 1], work.sin[p : p + 1], back=True)[0]
            token += 1
    return out


@pytest.mark.thinned(1)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@lengths_of_steps
def test_attention(engine: Engine, shape: Shape, lengths: list[tuple[int, int]]) -> None:
    """Weights are rounded to bfloat16, and what comes out."""
    work = make_work(shape, lengths)
    assert_close(attend(engine, work), wanted_of(work), 3 * BFLOAT16)


def test_a_sink_takes_all(engine: Engine) -> None:
    work = make_work(SHAPES[0], [(40, 3)])
    work.sinks[1] = 100
    found = attend(engine, work)
    assert (np.abs(found[:, 1]) < 1e-20).all() and (np.abs(found[:, 0]) > 1e-3).any()


@pytest.mark.thinned(1)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_token_is_the_same_in_every_company(instruction_set: str, shape: Shape) -> None:
    work = make_work(shape, [(0, 200)])
    whole = attend(engine_of(instruction_set), work)
    for threads in (1, 2, 3):
        for begin, end in [(0, 1), (7, 9), (120, 135), (199, 200)]:
            part = replace(
                work,
                lengths=[(begin, end - begin)],
                queries=work.queries[begin:end],
                chosen=work.chosen[begin:end].copy(),
                rows=[work.rows[0][:end]],
                entries=[work.entries[0][: end // shape.ratio if shape.ratio else 0]],
            )
            assert np.array_equal(attend(engine_of(instruction_set, threads), part), whole[begin:end])
