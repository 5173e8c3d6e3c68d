"""Projections of a step's tokens, of which QK-norm and RoPE make queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.kernels.layouts import Array

EPS = 1e-6
LAYERS, LAYER = 3, 1
POSITIONS = 600


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    size: int = 32
    rotated: int = 0
    """Dimensions that turn; 0 for all. Queries then have tables of their own."""

    @property
    def all(self) -> int:
        return self.heads + 2 * self.kv_heads


SHAPES = [
    Shape(4, 2, 32),
    Shape(8, 1, 64, 32),
    Shape(3, 3, 96, 96),
    Shape(8, 4, 128, 64),
    Shape(2, 1, 256, 128),
    Shape(3, 1, 128, 32, rotated=96),
    Shape(4, 2, 64, 32, rotated=32),
]


@dataclass(frozen=True)
class Work:
    """Projections of a step's tokens with what `heads` needs beside them, and blocks for each row."""

    shape: Shape
    lengths: list[tuple[int, int]]
    x: Array
    weights: Array
    cos: Array
    sin: Array
    query_tables: tuple[Array, Array] | None
    blocks: list[Array]

    @property
    def positions(self) -> Array:
        return np.concatenate([np.arange(first, first + count) for first, count in self.lengths])

    @property
    def slots(self) -> Array:
        size = self.shape.size
        return np.concatenate(
            [
                blocks[p // size] * size + p % size
                for blocks, (first, count) in zip(self.blocks, self.lengths, strict=True)
                for p in [np.arange(first, first + count)]
            ]
        )

    @property
    def num_blocks(self) -> int:
        return 1 + sum(map(len, self.blocks))


def make_work(shape: Shape, lengths: list[tuple[int, int]], seed: int = 0) -> Work:
    rng = np.random.default_rng(seed)
    needs = [-(-(first + count) // shape.size) for first, count in lengths]
    ids = 1 + rng.permutation(sum(needs))
    angles = rng.uniform(0, 2 * np.pi, (POSITIONS, (shape.rotated or shape.dim) // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    tokens = sum(count for _, count in lengths)
    return Work(
        shape,
        lengths,
        x=rng.standard_normal((tokens, shape.all, shape.dim)).astype(np.float32) * 3,
        weights=rng.uniform(0.5, 2, (shape.heads + shape.kv_heads, shape.dim)).astype(np.float32),
        cos=cos,
        sin=sin,
        query_tables=(2 * cos, 2 * sin) if shape.rotated else None,
        blocks=np.split(ids, np.cumsum(needs)[:-1]),
    )


STEPS = [[(0, 1)], [(0, 50)], [(31, 1), (0, 17), (126, 5), (7, 1)], [(p, 1) for p in range(40)], [(500, 13), (0, 128)]]
