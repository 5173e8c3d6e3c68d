"""Batch-invariant paged attention: prefill and decode compute the same, bit by bit.

The context of a sequence is cut into tiles of `TILE` absolute positions. Every product of queries with a tile has the
same sizes for any context. So a query's result depends neither on other rows nor on how its context was computed.
The online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867) merges tiles in order. K and V are read as stored.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pypto_serving.model.collectives import TorchCollectives
from pypto_serving.types.kv import KVCacheGroupSpec
from pypto_serving.util import ceil_div


@dataclass(frozen=True, slots=True)
class StepTensors:
    """One step over r packed rows and t tokens, all int64; see StepInputs.

    token_ids, positions [t]; query_start [r + 1]; context_lens [r]; logits_rows [s]; slots[g] [t];
    block_tables[g] [r, n]. Tokens from query_start[r] on are padding: they belong to no row and lie in the null
    block. The end of logits_rows may also be padding.
    """

    token_ids: Tensor
    positions: Tensor
    query_start: Tensor
    context_lens: Tensor
    logits_rows: Tensor
    slots: tuple[Tensor, ...]
    block_tables: tuple[Tensor, ...]


TILE = 256
"""Positions per tile, rounded up to whole blocks."""

_QUERIES_PER_TILE = 128
_CACHED_BYTES = 2 << 20
QUERY_ROW_FLOORS = (2, 4, 8, 16, 32)
_MASKED = torch.finfo(torch.float32).min


class KVArena:
    """Owns the pages of one full-history group, [blocks, layers, k or v, all_heads, block_size, head_dim].

    A hidden last block stays zero, and is read in place of blocks that a sequence does not have. Memory is committed
    when first written. All ranks share the pages, and each has `kv_heads` of them. If several ranks have the same head,
    the first one writes it, and a barrier precedes reading.
    """

    def __init__(
        self, group: KVCacheGroupSpec, num_blocks: int, dtype: torch.dtype, comm: TorchCollectives | None = None
    ) -> None:
        keys = group.tensors[0]
        self.layers = len(keys.layers)
        self.all_heads, self.head_dim = keys.row_shape
        self._comm = comm or TorchCollectives()
        rank = self._comm.rank
        self._heads = rank.kv_heads(self.all_heads)
        self._writes = rank.writes_kv(self.all_heads)
        self._repeated = rank.topology.repeats_kv_heads(self.all_heads)
        self.kv_heads = len(self._heads)
        self.block_size = group.block_size
        self.zero_block = num_blocks
        self.query_rows = QUERY_ROW_FLOORS[-1]
        shape = (num_blocks + 1, self.layers, 2, self.all_heads, self.block_size, self.head_dim)
        with torch.inference_mode(False):  # others may write pages too
            self.pages = self._comm.pages((num_blocks + 1) * group.block_bytes).view(dtype).view(shape)
        self._rows = self.pages.view(-1, self.head_dim)
        self._head_blocks = self.pages.view(-1, self.block_size * self.head_dim)

    def row_index(self, slots: Tensor) -> Tensor:
        """Return the rows of layer 0's keys at `slots` [t], int64 [t * kv_heads]."""
        heads_per_block = self.layers * 2 * self.all_heads
        head = slots[:, None] // self.block_size * heads_per_block + self._head_index(slots.device)
        return (head * self.block_size + slots[:, None] % self.block_size).flatten()

    def block_index(self, blocks: Tensor) -> Tensor:
        """Return the head blocks of layer 0's keys for `blocks` [rows, n], int64 [rows * kv_heads * n]."""
        heads = self._head_index(blocks.device)[None, :, None]
        return (blocks[:, None, :] * (self.layers * 2 * self.all_heads) + heads).flatten()

    def _head_index(self, device: torch.device) -> Tensor:
        return torch.arange(self._heads.start, self._heads.stop, device=device)

    def write(self, layer: int, row_index: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store `keys` and `values` [t, kv_heads, head_dim] of `layer`, and wait until they can be read."""
        if self._writes:
            for which, rows in enumerate((keys, values)):
                start = (layer * 2 + which) * self.all_heads * self.block_size
                self._rows[start:].index_copy_(0, row_index, rows.reshape(-1, self.head_dim))
        if self._repeated:
            self._comm.barrier()

    def read(self, layer: int, which: int, block_index: Tensor, positions: int) -> Tensor:
        """Read the blocks of `block_index`, [rows * kv_heads, positions, head_dim]."""
        start = (layer * 2 + which) * self.all_heads
        return self._head_blocks[start:].index_select(0, block_index).view(-1, positions, self.head_dim)

    def clear(self, blocks: Tensor) -> None:
        """Zero the heads that this rank writes of `blocks` in all layers."""
        if len(blocks) and self._writes:
            self.pages[:, :, :, self._heads.start : self._heads.stop].index_fill_(0, blocks, 0)


@dataclass(frozen=True, slots=True)
class KVTile:
    """Positions [start, start + width) of the first `rows` rows of a query tile.

    `masked`, bool [rows, 1, queries, 1, width], is the causal mask; None if every query sees the whole tile.
    """

    rows: int
    block_index: Tensor
    masked: Tensor | None


@dataclass(frozen=True, slots=True)
class QueryTile:
    """`rows` rows with `queries` tokens each; `tokens` [rows * queries] are their places in the step.

    Rows are sorted by falling context, so each KV tile concerns the first few.
    """

    tokens: Tensor
    rows: int
    queries: int
    kv: tuple[KVTile, ...]


class StepAttention:
    """The attention plan of one step: the KV tiles of every query. It serves all layers."""

    def __init__(self, arena: KVArena, step: StepTensors, group: int = 0) -> None:
        self._arena = arena
        self._width = ceil_div(TILE, arena.block_size) * arena.block_size
        self._tables = step.block_tables[group]
        self._positions = step.positions
        slots = step.slots[group]
        self.row_index = arena.row_index(slots)
        # Clear a block when its first row is written: an earlier owner may have left NaN in it.
        real = slots[: int(step.query_start[-1])]
        arena.clear(real[real % arena.block_size == 0] // arena.block_size)
        self.tiles = tuple(self._query_tiles(step))

    def _query_tiles(self, step: StepTensors) -> list[QueryTile]:
        starts = step.query_start.tolist()
        counts = [end - start for start, end in itertools.pairwise(starts)]
        contexts = step.context_lens.tolist()
        singles = sorted((i for i, n in enumerate(counts) if n == 1), key=lambda i: -contexts[i])
        together = self._rows_per_tile()
        tiles = [
            self._tile(rows := _recurring(singles[i : i + together]), [starts[row] for row in rows], [1] * len(rows))
            for i in range(0, len(singles), together)
        ]
        for row, count in enumerate(counts):
            if count > 1:
                for first in range(starts[row], starts[row + 1], _QUERIES_PER_TILE):
                    tiles.append(self._tile([row], [first], [min(_QUERIES_PER_TILE, starts[row + 1] - first)]))
        return tiles

    def _rows_per_tile(self) -> int:
        """Return the decode rows per query tile: the keys of one KV tile must stay in a core's cache."""
        arena = self._arena
        return max(1, _CACHED_BYTES // (arena.kv_heads * self._width * arena.head_dim * arena.pages.itemsize))

    def _tile(self, rows: Sequence[int], firsts: Sequence[int], counts: Sequence[int]) -> QueryTile:
        """Make a tile of `counts[i]` queries of rows[i] from token firsts[i] on; all counts are equal."""
        queries = _recurring_size(counts[0])
        device = self._positions.device
        offsets = torch.arange(queries, device=device).clamp(max=counts[0] - 1)
        tokens = (torch.tensor(firsts, device=device)[:, None] + offsets).flatten()
        positions = self._positions[tokens].view(len(rows), queries)
        lengths = positions[:, -1] + 1
        tables = self._tables[torch.tensor(rows, device=device)]
        kv = []
        for start in range(0, int(lengths[0]), self._width):
            reached = min(len(rows), _recurring_size(int((lengths > start).sum())))
            kv.append(self._kv_tile(tables[:reached], positions[:reached], lengths[:reached], start))
        return QueryTile(tokens, len(rows), queries, tuple(kv))

    def _kv_tile(self, tables: Tensor, positions: Tensor, lengths: Tensor, start: int) -> KVTile:
        size, device = self._arena.block_size, tables.device
        first, count = start // size, self._width // size
        blocks = torch.full((len(tables), count), self._arena.zero_block, device=device)
        known = tables[:, first : first + count]
        written = torch.arange(first, first + known.shape[1], device=device) * size < lengths[:, None]
        blocks[:, : known.shape[1]] = known.where(written, self._arena.zero_block)
        masked = None
        if int(positions.min()) < start + self._width - 1:
            masked = torch.arange(start, start + self._width, device=device) > positions[..., None]
            masked = masked[:, None, :, None, :]
        return KVTile(len(tables), self._arena.block_index(blocks), masked)

    def __call__(self, layer: int, q: Tensor, out: Tensor) -> None:
        """Attend with q [t, heads, head_dim], already scaled, into out [t, heads * head_dim]."""
        for tile in self.tiles:
            attended = self._attend(layer, q.index_select(0, tile.tokens), tile)
            out.index_copy_(0, tile.tokens, attended.to(out.dtype))

    def _attend(self, layer: int, q: Tensor, tile: QueryTile) -> Tensor:
        """Attend with one query tile: q [rows * queries, heads, head_dim] to [rows * queries, heads * head_dim]."""
        arena, width = self._arena, self._width
        per_head = q.view(tile.rows, tile.queries, arena.kv_heads, -1, arena.head_dim).transpose(1, 2)
        stacked = per_head.reshape(tile.rows * arena.kv_heads, -1, arena.head_dim)
        stacked = F.pad(stacked, (0, 0, 0, max(0, arena.query_rows - stacked.shape[1])))
        total: Partial | None = None
        for kv in tile.kv:
            keys = arena.read(layer, 0, kv.block_index, width)
            scores = product(stacked[: len(keys)], keys.transpose(1, 2))
            if kv.masked is not None:
                _mask(scores, kv, tile.queries, per_head.shape[3])
            part = _attend_tile(scores, arena.read(layer, 1, kv.block_index, width), len(tile.kv) > 1)
            total = part if total is None else total.merge(part)
        assert total is not None
        attended = total.out[:, : tile.queries * per_head.shape[3]].reshape(per_head.shape)
        return attended.transpose(1, 2).reshape(len(q), -1)


def _recurring_size(n: int) -> int:
    """Round `n` up to one of few sizes, so that memory and prepared code are reused."""
    return n if n <= 4 else ceil_div(n, 8) * 8


def _recurring(rows: list[int]) -> list[int]:
    """Repeat the last of `rows` up to a recurring size."""
    return rows + rows[-1:] * (_recurring_size(len(rows)) - len(rows))


@dataclass(frozen=True, slots=True)
class Partial:
    """Attention over the positions so far, for b heads of m queries each.

    `out` [b, m, d] is normalised; `row_max` [b, m, 1] is the largest score, and `row_sum` [b, m, 1] the sum of
    exponentials relative to it. Both are None where nothing will be merged.
    """

    out: Tensor
    row_max: Tensor | None
    row_sum: Tensor | None

    def merge(self, part: Partial) -> Partial:
        """Merge the next tile of the first rows into this, in place, and return this."""
        assert (
            self.row_max is not None
            and self.row_sum is not None
            and part.row_max is not None
            and part.row_sum is not None
        )
        b = len(part.out)
        row_max, row_sum, out = self.row_max[:b], self.row_sum[:b], self.out[:b]
        higher = torch.maximum(row_max, part.row_max)
        old, new = row_sum * torch.exp(row_max - higher), part.row_sum * torch.exp(part.row_max - higher)
        both = old + new
        out.mul_(old / both).add_(part.out * (new / both))
        row_max.copy_(higher)
        row_sum.copy_(both)
        return self


def _mask(scores: Tensor, kv: KVTile, queries: int, heads_per_group: int) -> None:
    """Mask `scores` [rows * kv_heads, m, width] where `kv.masked`; rows past the queries are padding."""
    assert kv.masked is not None
    used = scores[:, : queries * heads_per_group]
    used.view(kv.rows, -1, queries, heads_per_group, scores.shape[2]).masked_fill_(kv.masked, _MASKED)


def _attend_tile(scores: Tensor, values: Tensor, merged: bool) -> Partial:
    """Softmax of `scores` [b, m, width] float32 times `values` [b, width, d].

    The largest probability is 1 / row_sum, which saves a second pass over the exponentials.
    """
    probabilities = torch.softmax(scores, dim=-1)
    out = torch.bmm(probabilities.to(values.dtype), values).float()
    if not merged:
        return Partial(out, None, None)
    row_max, largest = scores.amax(dim=-1, keepdim=True), probabilities.amax(dim=-1, keepdim=True)
    return Partial(out, row_max, largest.reciprocal_())


def product(a: Tensor, b: Tensor) -> Tensor:
    """Compute a @ b, [b, m, k] by [b, k, n], in float32 whatever the dtype of the operands.

    torch rounds a bfloat16 product to bfloat16. A second product starts from the negated first and is rounded only
    after the subtraction; it recovers what the first rounding lost.
    """
    if a.dtype == torch.float32:
        return torch.bmm(a, b)
    rounded = torch.bmm(a, b)
    rest = torch.baddbmm(rounded, a, b, beta=-1)
    return rest.float().add_(rounded)


def settle_query_rows(head_dim: int, dtype: torch.dtype) -> int | None:
    """Find the fewest queries per product from which results do not depend on their number; None if there are none."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 128, head_dim), (3, TILE, head_dim), (3, TILE, head_dim))
    device = torch.get_default_device()
    q, keys, values = (torch.randn(s, generator=generator, device="cpu").to(device, dtype) for s in shapes)

    def attend(rows: int, heads: int) -> Tensor:
        scores = product(q[:heads, :rows].contiguous(), keys[:heads].transpose(1, 2))
        return _attend_tile(scores, values[:heads], False).out

    whole = attend(128, 3)
    for floor in QUERY_ROW_FLOORS:
        probes = ((rows, heads) for rows in (floor, floor + 1, 3 * floor + 1, 64) for heads in (1, 3))
        if all(torch.equal(attend(rows, heads), whole[:heads, :rows]) for rows, heads in probes):
            return floor
    return None
