"""Rows with random history in pages, and paged attention over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pypto_serving.kernels import Engine, KVCacheLayer
from tests.kernels import references
from tests.kernels.layouts import NAN, Array, narrow, pages_of_keys, pages_of_values, random_bf16
from tests.kernels.references import BFLOAT16, assert_close
from tests.kernels.stage import Stage, int32

LAYERS, LAYER = 2, 1
SHAPES = [
    (1, 1, 32, 32),
    (4, 2, 64, 32),
    (7, 1, 96, 32),
    (8, 1, 128, 128),
    (6, 2, 128, 64),
    (2, 2, 160, 96),
    (3, 1, 256, 32),
]
"""Heads, kv heads, dim and block size."""
ALONE = [(6, 2, 64), (8, 1, 128), (1, 1, 32)]


@dataclass(frozen=True)
class Row:
    """Queries [t, heads, dim] at positions `first` on, over keys and values [first + t, kv_heads, dim]."""

    first: int
    queries: Array
    keys: Array
    values: Array

    def part(self, begin: int, end: int) -> Row:
        """A chunk of the row's queries, with the history that it has by then."""
        length = self.first + end
        return Row(self.first + begin, self.queries[begin:end], self.keys[:length], self.values[:length])


def random_row(seed: int, first: int, count: int, heads: int, kv_heads: int, dim: int) -> Row:
    rng = np.random.default_rng(seed)
    queries = random_bf16(rng, count, heads, dim, scale=3 * dim**-0.5)
    keys, values = (random_bf16(rng, first + count, kv_heads, dim) for _ in range(2))
    return Row(first, queries, keys, values)


def cache_of(rows: Sequence[Row], size: int, seed: int) -> tuple[Array, Array]:
    """Pages with the rows' keys and values in random blocks, NaN everywhere else, and block tables."""
    _, kv_heads, dim = rows[0].keys.shape
    needs = [-(-len(row.keys) // size) for row in rows]
    ids = np.split(1 + np.random.default_rng(seed).permutation(sum(needs)), np.cumsum(needs)[:-1])
    pages = np.full((sum(needs) + 2, LAYERS, 2, kv_heads, size * dim), NAN, np.uint16)
    tables = np.zeros((len(rows), max(needs)), np.int32)
    for row, blocks, table in zip(rows, ids, tables, strict=True):
        table[: len(blocks)] = blocks
        tokens = np.full((2, len(blocks) * size, kv_heads, dim), NAN, np.uint16)
        tokens[0, : len(row.keys)], tokens[1, : len(row.keys)] = narrow(row.keys), narrow(row.values)
        tokens[1, len(row.keys) : len(row.keys) + len(row.keys) % 2] = 0
        keys, values = tokens.reshape(2, len(blocks), size, kv_heads, dim).swapaxes(2, 3)
        pages[blocks, LAYER, 0], pages[blocks, LAYER, 1] = pages_of_keys(keys), pages_of_values(values)
    return pages, tables


def attend_to(engine: Engine, rows: Sequence[Row], pages: Array, tables: Array) -> list[Array]:
    """What each row's queries attend to, [t, heads, dim], where its history lies in these pages."""
    heads, dim = rows[0].queries.shape[1:]
    counts = [len(row.queries) for row in rows]
    stage, tokens = Stage(engine), sum(counts)
    out = stage.strip_room(tokens, heads * dim)
    queries = narrow(np.concatenate([row.queries for row in rows]))
    stage.record.paged_attention(queries, KVCacheLayer(pages, LAYER, dim), out)
    lengths = [(row.first, count) for row, count in zip(rows, counts, strict=True)]
    stage.play(tokens, lengths=lengths, tables=int32(tables))
    return np.split(stage.rows(out, tokens, heads * dim).reshape(tokens, heads, dim), np.cumsum(counts)[:-1])


@dataclass(frozen=True)
class KvForm:
    """What a cache holds: how rows are put into pages, and what must be found of a row, with the error allowed."""

    cache_of: Callable[[Sequence[Row], int, int], tuple[Array, Array]]
    wanted: Callable[[Row], tuple[Array, Array]]

    def attend(self, engine: Engine, rows: Sequence[Row], size: int = 32, seed: int = 0) -> list[Array]:
        """What each row's queries attend to, [t, heads, dim]."""
        return attend_to(engine, rows, *self.cache_of(rows, size, seed))

    def assert_attends(self, found: Array, row: Row) -> None:
        assert_close(found, *self.wanted(row))


def _wanted(row: Row) -> tuple[Array, Array]:
    """Weights are rounded to bfloat16 before they are summed, and so is the result."""
    wanted = references.attention(row.queries, row.keys, row.values, row.first)
    spread = references.attention(row.queries, row.keys, np.abs(row.values), row.first)
    return wanted, 1.02 * BFLOAT16 * (np.abs(wanted) + 2 * spread)


BF16_KV = KvForm(cache_of, _wanted)
attend, assert_attends = BF16_KV.attend, BF16_KV.assert_attends
