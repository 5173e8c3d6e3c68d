"""Blocks of several KV groups, and a step over them: what the kernels of DeepSeek V4 work on."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pypto_serving.kernels import PagedRows
from tests.kernels.layouts import Array, narrow, widen
from tests.kernels.stage import Stage

LAYERS, LAYER = 3, 1
"""Layers of an arena, and the one that tests use."""


@dataclass(frozen=True)
class Rows:
    """A tensor of one group: `width` numbers of `dtype` (uint16 is bfloat16) for every `ratio` tokens."""

    width: int
    size: int = 16
    ratio: int = 1
    dtype: type = np.uint16


@dataclass
class Blocks:
    """Arenas of groups, filled with NaN, with random block ids for sequences of `lengths` (first position, tokens)."""

    groups: list[Rows]
    lengths: list[tuple[int, int]]
    seed: int = 0
    arenas: list[Array] = field(default_factory=list)
    tables: list[Array] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        for group in self.groups:
            needs = [-(-(first + count) // group.size) for first, count in self.lengths]
            ids = 1 + rng.permutation(sum(needs))
            table = np.zeros((len(needs), max(needs)), np.int32)
            for row, mine in zip(table, np.split(ids, np.cumsum(needs)[:-1]), strict=True):
                row[: len(mine)] = mine
            shape = (1 + sum(needs), LAYERS, group.size // group.ratio, group.width)
            memory = np.full(int(np.prod(shape)) * np.dtype(group.dtype).itemsize, 0xFF, np.uint8)
            self.arenas.append(memory.view(group.dtype).reshape(shape))
            self.tables.append(table)

    @property
    def positions(self) -> Array:
        return np.concatenate([np.arange(first, first + count) for first, count in self.lengths])

    def rows_at(self, group: int, row: int, positions: Array) -> tuple[Array, Array]:
        """Block and row in it of a sequence's positions."""
        rows = self.groups[group]
        return self.tables[group][row, positions // rows.size], positions % rows.size // rows.ratio

    def slots(self, group: int) -> Array:
        size = self.groups[group].size
        parts = []
        for row, (first, count) in enumerate(self.lengths):
            p = np.arange(first, first + count)
            parts.append(self.tables[group][row, p // size] * size + p % size)
        return np.concatenate(parts).astype(np.int32)

    def fill(self, group: int, row: int, values: Array) -> None:
        """Rows of a sequence from position 0 on, [n, width] float32: one for every `ratio` positions."""
        block, place = self.rows_at(group, row, np.arange(len(values)) * self.groups[group].ratio)
        narrowed = narrow(values) if self.groups[group].dtype is np.uint16 else values
        self.arenas[group][block, LAYER, place] = narrowed

    def read(self, group: int, row: int, positions: Array) -> Array:
        """Rows [n, width] in float32 that hold these positions."""
        block, place = self.rows_at(group, row, positions)
        found = self.arenas[group][block, LAYER, place]
        return widen(found) if found.dtype == np.uint16 else found

    def pages(self, stage: Stage, group: int) -> PagedRows:
        arena, rows = self.arenas[group], self.groups[group]
        flat = arena.view(np.uint8).reshape(len(arena), -1)
        row_bytes = rows.width * arena.itemsize
        offset = LAYER * rows.size // rows.ratio * row_bytes
        return stage.record.pages(flat, offset, row_bytes, group, rows.size, rows.ratio)

    def play(self, stage: Stage) -> None:
        groups = [(self.slots(i), table) for i, table in enumerate(self.tables)]
        stage.play(len(self.positions), lengths=self.lengths, groups=groups)


def to_query_panels(queries: Array) -> Array:
    """Queries [t, heads, dim] as panels of pairs [t, heads / 32, dim / 2, 32]."""
    tokens, heads, dim = queries.shape
    panels = -(-heads // 32)
    padded = np.zeros((tokens, panels * 32, dim), np.float32)
    padded[:, :heads] = queries
    pairs = narrow(padded).view(np.uint32).reshape(tokens, panels, 32, dim // 2)
    return np.ascontiguousarray(pairs.swapaxes(-1, -2))


def from_query_panels(panels: Array, heads: int) -> Array:
    """The reverse: [t, heads, dim], float32."""
    tokens, count, half, _ = panels.shape
    pairs = np.ascontiguousarray(panels.swapaxes(-1, -2)).reshape(tokens, count * 32, half)
    return widen(pairs.view(np.uint16))[:, :heads]


def angles(positions: int, pairs: int, seed: int = 0) -> tuple[Array, Array]:
    """Random cosines and sines [positions, pairs]."""
    turns = np.random.default_rng(seed).uniform(0, 2 * np.pi, (positions, pairs))
    return np.cos(turns).astype(np.float32), np.sin(turns).astype(np.float32)


def rotate_pairs(x: Array, cos: Array, sin: Array, back: bool = False) -> Array:
    """Float64 vectors [n, ..., dim] whose trailing pairs of neighbours are rotated by angles [n, pairs]."""
    x = np.array(x, np.float64)
    shape = (len(x), *[1] * (x.ndim - 2), -1)
    c, s = (np.asarray(part, np.float64).reshape(shape) for part in (cos, -sin if back else sin))
    plain = x.shape[-1] - 2 * cos.shape[-1]
    even, odd = x[..., plain::2].copy(), x[..., plain + 1 :: 2].copy()
    x[..., plain::2], x[..., plain + 1 :: 2] = even * c - odd * s, even * s + odd * c
    return x
