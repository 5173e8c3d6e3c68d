"""What a dispatch reads on the device: its inputs, the KV blocks, and how chunks are cut into tiles of queries."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from pypto_serving.types.arrays import Int32Array


@dataclass(frozen=True, slots=True)
class KVPages:
    """The KV blocks of a group, bfloat16, all layers of a block together. Block 0 is the null block.

    `data` is flat: [block][layer][key or value][kv head][token of the block][head_dim]. Strides are in elements.
    """

    data: Tensor
    num_blocks: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    @property
    def head_stride(self) -> int:
        """Return the distance from one kv head to the next of the same block and layer."""
        return self.block_size * self.head_dim

    @property
    def value_stride(self) -> int:
        """Return the distance from a key to its value."""
        return self.num_kv_heads * self.head_stride

    @property
    def layer_stride(self) -> int:
        return 2 * self.value_stride

    @property
    def block_stride(self) -> int:
        return self.num_layers * self.layer_stride

    def view(self) -> Tensor:
        """Return `data` as [block, layer, key or value, kv head, token of the block, head_dim]."""
        shape = self.num_blocks, self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim
        return self.data.view(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchTensors:
    """The inputs of a dispatch over R rows and T tokens: int32 tensors at fixed addresses, padding included.

    Row i owns tokens [query_start[i], query_start[i + 1]), the last of the `context_lens[i]` tokens of its context. A
    row of padding computes token 0 at position 0 in the null block.
    """

    token_ids: Tensor
    """[T]; an id t < 0 stands for the token that the device sampled last for row -1 - t of the worker."""
    positions: Tensor
    """[T]"""
    slots: Tensor
    """[T]: block id * block_size + position % block_size."""
    query_start: Tensor
    """[R + 1]"""
    context_lens: Tensor
    """[R]"""
    block_tables: Tensor
    """[R, n]"""
    tiles: Tensor
    """[num_tiles, 2], by `tiles_of_chunks`; not read for decodes."""
    num_splits: int
    """At least as many splits as the longest context has; not read for chunks."""

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_rows(self) -> int:
        return self.context_lens.shape[0]


def max_tiles(num_tokens: int, num_rows: int, queries: int) -> int:
    """Return how many tiles of `queries` queries at most `num_rows` rows with `num_tokens` tokens together can have."""
    rows = min(num_rows, num_tokens)
    return rows + (num_tokens - rows) // queries


def tiles_of_chunks(query_start: Int32Array, context_lens: Int32Array, queries: int, num_tiles: int) -> Int32Array:
    """Cut each row's queries into tiles and list them, those with the longest context first.

    Return int32 [num_tiles, 2]: row, and first query of the tile in its row. Unused tiles at the end have row -1.
    """
    counts = np.diff(query_start)
    tiles_per_row = -(-counts // queries)
    total = int(tiles_per_row.sum())
    rows = np.repeat(np.arange(len(counts), dtype=np.int32), tiles_per_row)
    first_tiles = np.cumsum(tiles_per_row) - tiles_per_row
    firsts = (np.arange(total, dtype=np.int32) - first_tiles[rows]) * queries
    ends = np.minimum(firsts + queries, counts[rows]) - counts[rows] + context_lens[rows]
    order = np.argsort(-ends, kind="stable")
    tiles = np.full((num_tiles, 2), -1, np.int32)
    tiles[:total, 0] = rows[order]
    tiles[:total, 1] = firsts[order]
    return tiles
