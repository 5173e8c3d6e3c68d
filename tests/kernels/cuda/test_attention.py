"""Attention over KV pages: against float64, and bit by bit decodes against chunks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pypto_serving.kernels.cuda import attention
from pypto_serving.kernels.cuda.attention import ChunkSettings, DecodeSettings, attend_chunks, attend_decodes
from pypto_serving.kernels.cuda.step import max_tiles, tiles_of_chunks
from tests.kernels.cuda.contexts import LAYER, Contexts, error, poisoned, random

TOLERANCE = 5e-3


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SPLIT", 128)


@pytest.fixture(params=[32, 64])
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(attention, "TILE", request.param)
    return int(request.param)


def decode(
    contexts: Contexts,
    q: Tensor,
    rows: Sequence[int],
    num_splits: int = 3,
    window: int = 0,
    settings: DecodeSettings | None = None,
) -> Tensor:
    """Attend with `q` [rows, heads, head_dim] at the last positions of `rows`."""
    out = poisoned(*q.shape)
    partial = poisoned(attention.num_partial(*q.shape, num_splits), dtype=torch.float32)
    attend_decodes(q, contexts.decodes(rows, num_splits), LAYER, contexts.pages, partial, out, window, settings)
    return out


def chunks(
    contexts: Contexts,
    qs: Sequence[Tensor],
    rows: Sequence[int],
    ends: Sequence[int] | None = None,
    window: int = 0,
    settings: ChunkSettings | None = None,
) -> list[Tensor]:
    """Attend with queries `qs[i]` of `rows[i]` at the positions before `ends[i]`."""
    _, heads, _ = qs[0].shape
    queries = (settings or attention.CHUNKS).queries(heads, contexts.pages.num_kv_heads)
    counts = [len(q) for q in qs]
    step = contexts.chunks(rows, counts, ends or [contexts.lengths[row] for row in rows], queries)
    q = torch.cat(list(qs))
    out = poisoned(*q.shape)
    attend_chunks(q, step, LAYER, contexts.pages, out, window, settings)
    return list(out.split(counts))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [(4, 2, 128, 32), (2, 2, 64, 64), (6, 2, 64, 48), (2, 1, 256, 16), (7, 1, 16, 128), (20, 1, 32, 64)],
)
def test_attention_is_that_of_float64(tile: int, heads: int, kv_heads: int, head_dim: int, block_size: int) -> None:
    contexts = Contexts([150, 1, 128, 33], kv_heads, head_dim, block_size)
    q = random(4, heads, head_dim, seed=1)
    found = decode(contexts, q, range(4), num_splits=2)
    for row in range(4):
        assert error(found[row], contexts.attend(q[row : row + 1], row, contexts.lengths[row])[0]) < TOLERANCE
    qs = [random(count, heads, head_dim, seed=count) for count in (30, 6, 1)]
    rows = 0, 3, 1
    for row, q, result in zip(rows, qs, chunks(contexts, qs, rows), strict=True):
        assert error(result, contexts.attend(q, row, contexts.lengths[row])) < TOLERANCE


def test_decodes_have_the_bits_of_decodes_alone(tile: int) -> None:
    contexts = Contexts([270, 40, 256, 129, 128], 1, 32, 64)
    q = random(5, 4, 32, seed=1)
    together = decode(contexts, q, range(5))
    for row, num_splits in ((0, 5), (1, 1), (2, 2), (4, 1)):  # one split: without the merge kernel
        assert torch.equal(decode(contexts, q[row : row + 1], [row], num_splits)[0], together[row])
    order = [3, 0, 4]
    assert torch.equal(decode(contexts, q[order], order), together[order])
    for settings in DecodeSettings(4, 3, tma=True), DecodeSettings(2, 5):
        assert torch.equal(decode(contexts, q, range(5), settings=settings), together)
    assert torch.equal(decode(contexts, q, range(5), window=270), together)


@pytest.mark.parametrize(("length", "cut", "block_size"), [(150, 17, 32), (128, 64, 64), (40, 1, 48)])
def test_chunks_have_the_bits_of_decodes(tile: int, length: int, cut: int, block_size: int) -> None:
    contexts = Contexts([length, 90], 1, 32, block_size)
    q = random(length, 3, 32, seed=1)
    other = random(20, 3, 32, seed=2)
    alone = decode(contexts, q[-1:], [0])[0]
    whole = chunks(contexts, [q], [0])[0]
    assert torch.equal(whole[-1], alone)
    parts = chunks(contexts, [q[:cut]], [0], [cut])[0], chunks(contexts, [q[cut:]], [0])[0]
    assert torch.equal(torch.cat(parts), whole)
    settings = [ChunkSettings(tma=False), ChunkSettings(128, 8), attention.SMALL_CHUNKS]
    for count, chosen in zip((1, 18, 35), settings, strict=True):
        first, last = chunks(contexts, [other, q[-count:]], [1, 0], settings=chosen)
        assert torch.equal(last, whole[-count:])
        assert torch.equal(first[-1], decode(contexts, other[-1:], [1])[0])


@pytest.mark.parametrize("window", [1, 20, 100, 130])
def test_windows_hide_old_positions(tile: int, window: int) -> None:
    contexts = Contexts([300, 40, 129], 1, 32, 32)
    rows = range(3)
    qs = [random(min(50, length), 2, 32, seed=length) for length in contexts.lengths]
    found = chunks(contexts, qs, rows, window=window)
    for row in rows:
        assert error(found[row], contexts.attend(qs[row], row, contexts.lengths[row], window)) < TOLERANCE
    contexts.tables[0, : (300 - window) // 32] = 0  # freed blocks
    alone = decode(contexts, torch.stack([q[-1] for q in qs]), rows, window=window)
    for row in rows:
        assert torch.equal(alone[row], found[row][-1])


def test_too_large_groups_are_refused() -> None:
    assert ChunkSettings(rows=64).queries(num_heads=20, num_kv_heads=4) == 8
    with pytest.raises(ValueError, match="no room for 128 heads"):
        ChunkSettings(rows=64).queries(num_heads=65, num_kv_heads=1)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 50)), min_size=1, max_size=8), st.integers(1, 16))
def test_tiles_cover_each_query_once(rows: list[tuple[int, int]], queries: int) -> None:
    counts = np.array([count for count, _ in rows], np.int32)
    lengths = np.array([count + computed for count, computed in rows], np.int32)
    start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    most = max_tiles(int(start[-1]), len(rows), queries)
    tiles = tiles_of_chunks(start, lengths, queries, most)
    assert tiles.shape == (most, 2) and tiles.dtype == np.int32
    used = tiles[tiles[:, 0] >= 0]
    assert (tiles[len(used) :] == -1).all()
    ends = [int(min(first + queries, counts[row]) + lengths[row] - counts[row]) for row, first in used]
    assert ends == sorted(ends, reverse=True)
    covered = [(row, query) for row, first in used for query in range(first, min(first + queries, counts[row]))]
    assert sorted(covered) == [(row, query) for row in range(len(rows)) for query in range(counts[row])]


def test_max_tiles_is_reached() -> None:
    assert max_tiles(10, 3, 4) == 4  # 1, 1 and 8 queries
    assert max_tiles(2, 3, 4) == 2
    assert len(tiles_of_chunks(np.array([0, 1, 2, 11]), np.array([1, 1, 9]), 4, max_tiles(11, 3, 4))) == 5
