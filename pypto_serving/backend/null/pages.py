"""Pages of the null backend: what is written for a token, what is read back, and the hash of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pypto_serving.types.arrays import Int32Array, UInt64Array
from pypto_serving.types.kv import KVCacheGroupSpec, KVTensorSpec
from pypto_serving.util import hash128

POISON = np.uint64(0)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(values: UInt64Array) -> UInt64Array:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014), never 0, so that it cannot be taken for poison."""
    z = values + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


def row_values(token_ids: NDArray[np.integer], positions: NDArray[np.integer]) -> UInt64Array:
    """What a page row holds for each token at its absolute position."""
    return mix(token_ids.astype(np.uint64) + (positions.astype(np.uint64) << np.uint64(32)))


def read_start(group: KVCacheGroupSpec, position: int) -> int:
    """First position whose row a query at `position` reads in a group with one row per token."""
    if group.kind == "rolling_state":
        return max(0, position // group.period * group.period - group.overlap)
    return group.first_needed(position)


def next_digest(groups: Sequence[KVCacheGroupSpec], token_ids: Sequence[int]) -> int:
    """Hash what a correct engine reads back of `token_ids`; digest % vocab is the greedy next token."""
    tokens = np.asarray(token_ids, dtype=np.int64)
    last = len(tokens) - 1
    values = row_values(tokens, np.arange(len(tokens)))
    digests = []
    for group in groups:
        for tensor in group.tensors:
            if tensor.ratio == 1:
                digests.append(_digest(values[read_start(group, last) :]))
            else:
                closed = (last + 1) // tensor.ratio
                digests.append(_digest(_fold(values[: closed * tensor.ratio], tensor.ratio)))
    return _join(digests)


def _fold(values: UInt64Array, ratio: int) -> UInt64Array:
    """Compressed entries: one for every `ratio` rows."""
    return mix(values.reshape(-1, ratio).sum(axis=1, dtype=np.uint64))


def _digest(values: UInt64Array) -> int:
    return int(values.sum(dtype=np.uint64)) ^ len(values)


def _join(digests: Sequence[int]) -> int:
    data = b"".join(digest.to_bytes(8, "little") for digest in digests)
    return int.from_bytes(hash128(data)[:8], "little")


@dataclass(slots=True)
class Tokens:
    """Tokens to write, [t] each: `owners` are their rows in `tables[g]` [r, n], `slots[g]` where they go in group g."""

    ids: Int32Array
    positions: Int32Array
    owners: Int32Array
    slots: list[Int32Array]
    tables: Sequence[Int32Array]

    def of(self, index: slice | NDArray[np.bool_]) -> Tokens:
        """Some of them."""
        slots = [each[index] for each in self.slots]
        return Tokens(self.ids[index], self.positions[index], self.owners[index], slots, self.tables)


class Pages:
    """Owns the pages as uint64 arrays, one value per row; page 0 is the null block.

    `arenas[g]` is [num_blocks, rows of all tensors], of which tensor i has the columns from `_columns[g][i]` on.
    """

    def __init__(self, groups: tuple[KVCacheGroupSpec, ...], num_blocks: tuple[int, ...]) -> None:
        self.groups = groups
        rows = [[group.block_size // tensor.ratio for tensor in group.tensors] for group in groups]
        self._columns = [np.cumsum([0, *counts]).tolist() for counts in rows]
        self.arenas = [np.full((blocks, sum(counts)), POISON) for blocks, counts in zip(num_blocks, rows, strict=True)]

    def poison(self, fresh: Sequence[Int32Array]) -> None:
        """Void the old content of blocks that change hands."""
        for arena, blocks in zip(self.arenas, fresh, strict=True):
            arena[blocks] = POISON

    def write(self, tokens: Tokens) -> None:
        """Write the rows of tokens: plain rows first, since compressed entries are folded from them."""
        values = row_values(tokens.ids, tokens.positions)
        for g, group in enumerate(self.groups):
            for i, tensor in enumerate(group.tensors):
                if tensor.ratio == 1:
                    self.arenas[g][self._place(g, i, tokens.slots[g])] = values
        for g, group in enumerate(self.groups):
            for i, tensor in enumerate(group.tensors):
                if tensor.ratio > 1:
                    self._write_entries(tokens, g, i, tensor)

    def _place(self, g: int, tensor: int, slots: Any) -> tuple[Any, Any]:
        """Block and column of a tensor's rows that source tokens in `slots` have."""
        block, offset = np.divmod(slots, self.groups[g].block_size)
        return block, self._columns[g][tensor] + offset // self.groups[g].tensors[tensor].ratio

    def _write_entries(self, tokens: Tokens, g: int, i: int, tensor: KVTensorSpec) -> None:
        """Fold the entries that these tokens close."""
        closing = np.flatnonzero((tokens.positions + 1) % tensor.ratio == 0)
        source = next(s for s, group in enumerate(self.groups) if group.name == tensor.folded_from)
        for index in closing:
            end = int(tokens.positions[index]) + 1
            rows = self._read(tokens.tables[source][tokens.owners[index]], source, end - tensor.ratio, end)
            self.arenas[g][self._place(g, i, tokens.slots[g][index])] = _fold(rows, tensor.ratio)[0]

    def digest(self, tables: Sequence[Int32Array], position: int) -> int:
        """Hash what the query at `position` reads through a row's block tables, `tables[g]` [n].

        Raises RuntimeError when a row that was never written, or was written by somebody else, is read.
        """
        digests = []
        for g, group in enumerate(self.groups):
            for i, tensor in enumerate(group.tensors):
                end = (position + 1) // tensor.ratio * tensor.ratio
                start = read_start(group, position) if tensor.ratio == 1 else 0
                digests.append(_digest(self._read(tables[g], g, start, end, i)))
        return _join(digests)

    def _read(self, table: Int32Array, g: int, start: int, end: int, tensor: int = 0) -> UInt64Array:
        """Rows of positions [start, end) through a block table: slot = block * block_size + position % block_size."""
        group = self.groups[g]
        positions = np.arange(start, end, group.tensors[tensor].ratio)
        blocks: Int32Array = table[positions // group.block_size]
        slots = blocks * group.block_size + positions % group.block_size
        values: UInt64Array = self.arenas[g][self._place(g, tensor, slots)]
        if (blocks == 0).any() or (values == POISON).any():
            raise RuntimeError(f"group {group.name}: a row of positions [{start}, {end}) is read but not there")
        return values
