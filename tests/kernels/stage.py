"""Records operations, replays them as one step, and looks that nothing was written beside their outputs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from pypto_serving.kernels import Engine, Matrix, Recording
from tests.kernels.layouts import Array, from_strips, to_panels, to_strips

FENCE = 64
"""Elements before and behind an output that must stay as they were."""


@functools.cache
def engine_of(instruction_set: str, threads: int = 1) -> Engine:
    """One engine for all tests that want the same."""
    return Engine(instruction_set, threads)


def int32(values: Any) -> Array:
    return np.ascontiguousarray(values, dtype=np.int32)


class Stage:
    """A recording on an engine, and fenced memory for its outputs; `play` runs it as one step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.record = Recording(engine)
        self._fences: list[Array] = []

    def room(self, dtype: Any, *shape: int) -> Array:
        """Memory of ones in every bit, NaN for floats, between two fences."""
        count, size = int(np.prod(shape)), np.dtype(dtype).itemsize
        memory = np.full((count + 2 * FENCE) * size, 0xFF, np.uint8).view(dtype)
        self._fences += [memory[:FENCE].view(np.uint8), memory[FENCE + count :].view(np.uint8)]
        return memory[FENCE : FENCE + count].reshape(shape)

    def copy(self, values: Array) -> Array:
        """Fenced memory with these values."""
        room = self.room(values.dtype, *values.shape)
        room[...] = values
        return room

    def strips(self, x: Array) -> Array:
        """Activations [rows, k] in strips."""
        return self.copy(to_strips(x, self.engine))

    def strip_room(self, rows: int, k: int) -> Array:
        return self.room(np.uint32, rows * k // 2)

    def rows(self, strips: Array, rows: int, k: int) -> Array:
        """Strips of activations as [rows, k]."""
        return from_strips(strips, rows, k, self.engine)

    def play(
        self,
        tokens: int,
        *,
        token_ids: Any = None,
        logits_rows: Any = (),
        lengths: Sequence[tuple[int, int]] | None = None,
        slots: Any = None,
        tables: Array | None = None,
        groups: Sequence[tuple[Array, Array]] = (),
        seconds: Array | None = None,
    ) -> None:
        """Replay as a step of `tokens` tokens; `lengths` are (first position, tokens) of each row, by default one.

        `groups` are slots and tables of KV groups, where there are several.
        """
        if not groups:
            table = int32(np.zeros((max(1, len(lengths or ())), 1))) if tables is None else tables
            groups = [(int32(np.zeros(tokens) if slots is None else slots), table)]
        lengths = [(0, tokens)] * bool(tokens) if lengths is None else lengths
        positions = [np.arange(first, first + count) for first, count in lengths]
        self.record.replay(
            int32(np.zeros(tokens) if token_ids is None else token_ids),
            int32(np.concatenate([[], *positions])),
            int32(np.cumsum([0, *(count for _, count in lengths)])),
            int32([first + count for first, count in lengths]),
            int32(logits_rows),
            *zip(*groups, strict=True),
            seconds,
        )
        assert all((fence == 0xFF).all() for fence in self._fences), "written beside an output"


def matrix_of(weights: Array, bias: Array | None = None) -> Matrix:
    """A matrix [n, k] for products, with its bias [n]."""
    n, k = weights.shape
    padded = None
    if bias is not None:
        padded = np.zeros(-(-n // 32) * 32, np.float32)
        padded[:n] = bias
    return Matrix(to_panels(weights), n, k, padded)
