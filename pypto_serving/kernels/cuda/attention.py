"""Attention over KV pages: one kernel for rows of one query, one for chunks, with one arithmetic.

The law: positions are cut at multiples of SPLIT, splits at multiples of TILE. Each split has an online softmax over its
tiles in order; splits are merged in order. Everything else (warps, stages, query tiles, who merges) changes no
bit. A sum of weights is a product with ones, since the order of other sums follows the layout of a tile; no
multiplication is fused with an addition, except in products.

A state of a softmax is (top, total, mixed): the largest score so far, the sum of the weights exp2(score - top), and the
sum of the weighted values. Its `total` is [rows, 16], 16 times the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from pypto_serving.kernels.cuda.launch import launch, power_of_two
from pypto_serving.kernels.cuda.products import has_bulk_copies
from pypto_serving.kernels.cuda.step import DispatchTensors, KVPages

SPLIT = 512
TILE = 64
_ONES = tl.constexpr(16)
_MERGED_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """How the programs of decodes run: `num_warps` for 128 of head_dim.

    `tma`: load with the tensor copy engine what lies in one block.
    """

    num_warps: int = 2
    num_stages: int = 3
    tma: bool = True


@dataclass(frozen=True, slots=True)
class ChunkSettings:
    """How the programs of chunks run: `num_warps` for 128 of head_dim.

    `rows`: rows of a tile of queries; a query has a row for each head of a group, and the group is padded to a power of
    two. `tma`: load tiles with the tensor copy engine where they lie in one block.
    """

    rows: int = 64
    num_warps: int = 4
    num_stages: int = 2
    tma: bool = True

    def queries(self, num_heads: int, num_kv_heads: int) -> int:
        """Return how many queries a tile has."""
        group = power_of_two(num_heads // num_kv_heads)
        if group > self.rows:
            raise ValueError(f"tiles of {self.rows} rows have no room for {group} heads")
        return self.rows // group


DECODES, FEW_DECODES = DecodeSettings(), DecodeSettings(num_stages=5)
CHUNKS = ChunkSettings()
SMALL_DECODES, SMALL_CHUNKS = DecodeSettings(tma=False), ChunkSettings(rows=32, tma=False)
"""For cards before sm_90, which have no tensor copies, and whose products keep more in registers."""
_FEW_ROWS = 4


def decode_settings(rows: int, device: torch.device) -> DecodeSettings:
    """Return the settings for decodes of so many rows: a few programs need more loads in flight."""
    if not has_bulk_copies(device):
        return SMALL_DECODES
    return FEW_DECODES if rows <= _FEW_ROWS else DECODES


def chunk_settings(device: torch.device) -> ChunkSettings:
    """Return the settings for chunks."""
    return CHUNKS if has_bulk_copies(device) else SMALL_CHUNKS


@triton.jit
def _rise(top, scores_top):
    """Return the new top, the shift of scores (finite, also if there is none yet) and the factor for old sums."""
    new_top = tl.maximum(top, scores_top)
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    return new_top, shift, tl.exp2(top - shift)


@triton.jit
def _add(scores, shift, values, total, mixed):
    weights = tl.exp2(scores - shift[:, None]).to(tl.bfloat16)
    ones = tl.full([values.shape[0], _ONES], 1.0, tl.float32).to(tl.bfloat16)
    return tl.dot(weights, ones, total), tl.dot(weights, values, mixed)


@triton.jit
def _merge(top, total, mixed, split_top, split_total, split_mixed):
    """Merge the state of a split into the state of those before it; totals are [rows] here."""
    new_top = tl.maximum(top, split_top)
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    factor = tl.exp2(top - shift)
    split_factor = tl.exp2(split_top - shift)
    total = total * factor + split_total * split_factor
    mixed = mixed * factor[:, None] + split_mixed * split_factor[:, None]
    return new_top, total, mixed


@triton.jit
def _load(
    head, page_rows, first_row, table, start, begin, end, block_stride,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, TMA: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Load keys and values of positions [start, start + TILE); if MASKED, zeros for those outside of [begin, end).

    `head` points to the head in block 0. If TMA, `page_rows` are the pages as rows of HEAD_DIM, and it is `first_row`.
    """
    columns = tl.arange(0, HEAD_DIM)[None, :]
    positions = start + tl.arange(0, TILE)
    if MASKED:
        live = (positions >= begin) & (positions < end)
        block = tl.load(table + positions // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        keys = head + (block * block_stride + positions % BLOCK_SIZE * HEAD_DIM)[:, None] + columns
        k = tl.load(keys, mask=live[:, None], other=0.0)
        v = tl.load(keys + KV_HEADS * BLOCK_SIZE * HEAD_DIM, mask=live[:, None], other=0.0)
    elif TMA:
        row = tl.load(table + start // BLOCK_SIZE) * (block_stride // HEAD_DIM) + first_row + start % BLOCK_SIZE
        k = page_rows.load([row, 0])
        v = page_rows.load([row + KV_HEADS * BLOCK_SIZE, 0])
    else:
        if BLOCK_SIZE % TILE == 0:
            block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
            offsets = block * block_stride + (start % BLOCK_SIZE + tl.arange(0, TILE)) * HEAD_DIM
        else:
            block = tl.load(table + positions // BLOCK_SIZE).to(tl.int64)
            offsets = block * block_stride + positions % BLOCK_SIZE * HEAD_DIM
        keys = head + offsets[:, None] + columns
        k = tl.load(keys)
        v = tl.load(keys + KV_HEADS * BLOCK_SIZE * HEAD_DIM)
    return k, v


@triton.jit
def _scores(q, k, scale, start, begin, end, queries, WINDOW: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr):
    """Multiply queries and keys; if MASKED, a query at position p sees (p - WINDOW, p] of [begin, end) only."""
    scores = tl.dot(q, tl.trans(k)) * scale
    if MASKED:
        positions = (start + tl.arange(0, TILE))[None, :]
        seen = (positions >= begin) & (positions < end) & (positions <= queries[:, None])
        if WINDOW:
            seen = seen & (positions > queries[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    return scores


@triton.jit
def _attend_tile(
    q, head, page_rows, first_row, table, start, begin, end, queries, top, total, mixed, block_stride, scale,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add a tile of positions to the state of a softmax."""
    k, v = _load(
        head, page_rows, first_row, table, start, begin, end, block_stride,
        KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE, TMA, MASKED,
    )  # fmt: skip
    scores = _scores(q, k, scale, start, begin, end, queries, WINDOW, TILE, MASKED)
    top, shift, factor = _rise(top, tl.max(scores, 1))
    total, mixed = _add(scores, shift, v, total * factor[:, None], mixed * factor[:, None])
    return top, total, mixed


@triton.jit(do_not_specialize=["table_stride", "num_splits"])
def _decode(
    q, pages, page_rows, block_tables, context_lens, partial_sums, partial_tops, out,
    table_stride, num_splits, block_stride, layer_offset, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, WINDOW: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Attend to a split of a row's context with the heads of one group. A context of one split is finished here."""
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    length = tl.load(context_lens + row)
    begin = 0
    if WINDOW:
        begin = tl.maximum(length - WINDOW, 0)
    start = split * SPLIT
    if (start < length) & (start + SPLIT > begin):
        end = tl.minimum(start + SPLIT, length)
        table = block_tables + row * table_stride
        head = pages + layer_offset + kv_head * (BLOCK_SIZE * HEAD_DIM)
        first_row = layer_offset // HEAD_DIM + kv_head * BLOCK_SIZE
        lanes = tl.arange(0, ROWS)
        columns = tl.arange(0, HEAD_DIM)[None, :]
        live = lanes < GROUP
        heads = row * HEADS + kv_head * GROUP + lanes
        q_tile = tl.load(q + heads[:, None] * HEAD_DIM + columns, mask=live[:, None], other=0.0)
        queries = tl.zeros([ROWS], tl.int32) + (length - 1)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS, _ONES], tl.float32)
        mixed = tl.zeros([ROWS, HEAD_DIM], tl.float32)
        if WINDOW:
            for at in range(tl.maximum(start, begin // TILE * TILE), end, TILE):
                top, total, mixed = _attend_tile(
                    q_tile, head, page_rows, first_row, table, at, begin, end, queries, top, total, mixed,
                    block_stride, scale, KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE, WINDOW, TMA, True,
                )  # fmt: skip
        else:
            whole = start + (end - start) // TILE * TILE
            for at in range(start, whole, TILE):
                top, total, mixed = _attend_tile(
                    q_tile, head, page_rows, first_row, table, at, begin, end, queries, top, total, mixed,
                    block_stride, scale, KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE, WINDOW, TMA, False,
                )  # fmt: skip
            if whole < end:
                top, total, mixed = _attend_tile(
                    q_tile, head, page_rows, first_row, table, whole, begin, end, queries, top, total, mixed,
                    block_stride, scale, KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE, WINDOW, TMA, True,
                )  # fmt: skip
        sums = tl.max(total, 1)
        if begin // SPLIT == (length - 1) // SPLIT:
            no_top = tl.full([ROWS], float("-inf"), tl.float32)
            no_sums = tl.zeros([ROWS], tl.float32)
            _, sums, mixed = _merge(no_top, no_sums, tl.zeros([ROWS, HEAD_DIM], tl.float32), top, sums, mixed)
            result = (mixed / sums[:, None]).to(tl.bfloat16)
            tl.store(out + heads[:, None] * HEAD_DIM + columns, result, mask=live[:, None])
        else:
            to = heads * num_splits + split
            tl.store(partial_sums + to[:, None] * HEAD_DIM + columns, mixed, mask=live[:, None])
            tl.store(partial_tops + to * 2, top, mask=live)
            tl.store(partial_tops + to * 2 + 1, sums, mask=live)


@triton.jit(do_not_specialize=["num_splits"])
def _merge_splits(
    partial_sums, partial_tops, context_lens, out, num_splits,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Merge the splits of a row and head in order, if there are several."""
    row = tl.program_id(0)
    length = tl.load(context_lens + row)
    first = 0
    if WINDOW:
        first = tl.maximum(length - WINDOW, 0) // SPLIT
    last = (length - 1) // SPLIT
    if last > first:
        columns = tl.arange(0, HEAD_DIM)[None, :]
        head = row.to(tl.int64) * HEADS + tl.program_id(1) + tl.zeros([1], tl.int64)
        top = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        mixed = tl.zeros([1, HEAD_DIM], tl.float32)
        for base in range(first, last + 1, AT_ONCE):
            for i in tl.static_range(AT_ONCE):
                live = base + i <= last
                at = head * num_splits + base + i
                split_top = tl.load(partial_tops + at * 2, mask=live, other=float("-inf"))
                split_total = tl.load(partial_tops + at * 2 + 1, mask=live, other=0.0)
                split_mixed = tl.load(partial_sums + at[:, None] * HEAD_DIM + columns, mask=live, other=0.0)
                top, total, mixed = _merge(top, total, mixed, split_top, split_total, split_mixed)
        tl.store(out + head[:, None] * HEAD_DIM + columns, (mixed / total[:, None]).to(tl.bfloat16))


def num_partial(num_rows: int, num_heads: int, head_dim: int, num_splits: int) -> int:
    """Return how many float32 values `attend_decodes` needs for partial results."""
    return num_rows * num_heads * num_splits * (head_dim + 2)


def attend_decodes(
    q: Tensor,
    step: DispatchTensors,
    layer: int,
    pages: KVPages,
    partial: Tensor,
    out: Tensor,
    window: int = 0,
    settings: DecodeSettings | None = None,
) -> None:
    """Attend with one query a row, the last position of its context.

    q, out: bfloat16 [rows, heads, head_dim]. `partial` has room for `num_partial` float32 values; rows of one split do
    not use it. `window`: how many positions a query sees, 0 for all.
    """
    rows, heads, head_dim = q.shape
    settings = settings or decode_settings(rows, q.device)
    splits = step.num_splits
    tma = settings.tma and pages.block_size % TILE == 0
    sums = rows * heads * splits * head_dim
    launch(
        _decode,
        (splits, pages.num_kv_heads, rows),
        *(q, pages.data, _page_rows(pages, TILE) if tma else pages.data, step.block_tables, step.context_lens),
        *(partial, partial[sums:], out),
        *(step.block_tables.stride(0), splits, pages.block_stride, layer * pages.layer_stride, _scale(head_dim)),
        HEADS=heads,
        KV_HEADS=pages.num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=pages.block_size,
        SPLIT=SPLIT,
        TILE=TILE,
        ROWS=max(16, power_of_two(heads // pages.num_kv_heads)),
        WINDOW=window,
        TMA=tma,
        num_warps=settings.num_warps * max(1, head_dim // 128),
        num_stages=settings.num_stages,
        enable_fp_fusion=False,
    )
    if splits > 1:
        launch(
            _merge_splits,
            (rows, heads),
            *(partial, partial[sums:], step.context_lens, out, splits),
            HEADS=heads,
            HEAD_DIM=head_dim,
            SPLIT=SPLIT,
            WINDOW=window,
            AT_ONCE=_MERGED_AT_ONCE,
            num_warps=1,
            enable_fp_fusion=False,
        )


@triton.jit(do_not_specialize=["table_stride"])
def _chunk(
    q, pages, page_rows, block_tables, query_start, context_lens, tiles, out,
    table_stride, block_stride, layer_offset, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, PADDED_GROUP: tl.constexpr, WINDOW: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Attend with a tile of a row's queries and the heads of one group."""
    row = tl.load(tiles + tl.program_id(0) * 2)
    if row < 0:
        return
    kv_head = tl.program_id(1)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    first_query = tl.load(tiles + tl.program_id(0) * 2 + 1)
    token = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - token
    length = tl.load(context_lens + row)
    table = block_tables + row.to(tl.int64) * table_stride
    head = pages + layer_offset + kv_head * (BLOCK_SIZE * HEAD_DIM)
    first_row = layer_offset // HEAD_DIM + kv_head * BLOCK_SIZE
    columns = tl.arange(0, HEAD_DIM)[None, :]
    lanes = tl.arange(0, ROWS)
    query = first_query + lanes // PADDED_GROUP
    live = (query < count) & (lanes % PADDED_GROUP < GROUP)
    heads = (token + query).to(tl.int64) * HEADS + kv_head * GROUP + lanes % PADDED_GROUP
    q_tile = tl.load(q + heads[:, None] * HEAD_DIM + columns, mask=live[:, None], other=0.0)
    queries = tl.minimum(length - count + query, length - 1)
    first_position = length - count + first_query
    context_end = tl.minimum(first_position + ROWS // PADDED_GROUP, length)
    begin = 0
    if WINDOW:
        begin = tl.maximum(first_position + 1 - WINDOW, 0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    sums = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    for start in range(begin // SPLIT * SPLIT, context_end, SPLIT):
        end = tl.minimum(start + SPLIT, context_end)
        split_top = tl.full([ROWS], float("-inf"), tl.float32)
        split_total = tl.zeros([ROWS, _ONES], tl.float32)
        split_mixed = tl.zeros([ROWS, HEAD_DIM], tl.float32)
        masked = tl.maximum(start, begin // TILE * TILE)
        if WINDOW == 0:  # tiles before the first query are seen whole, by all queries
            masked = start + tl.maximum(tl.minimum(end, first_position + 1) - start, 0) // TILE * TILE
            for at in range(start, masked, TILE):
                split_top, split_total, split_mixed = _attend_tile(
                    q_tile, head, page_rows, first_row, table, at, begin, end, queries, split_top, split_total,
                    split_mixed, block_stride, scale, KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE, WINDOW, TMA, False,
                )  # fmt: skip
        for at in range(masked, end, TILE):
            split_top, split_total, split_mixed = _attend_tile(
                q_tile, head, page_rows, first_row, table, at, begin, end, queries, split_top, split_total,
                split_mixed, block_stride, scale, KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE, WINDOW, TMA, True,
            )  # fmt: skip
        top, sums, mixed = _merge(top, sums, mixed, split_top, tl.max(split_total, 1), split_mixed)
    tl.store(out + heads[:, None] * HEAD_DIM + columns, (mixed / sums[:, None]).to(tl.bfloat16), mask=live[:, None])


def attend_chunks(
    q: Tensor,
    step: DispatchTensors,
    layer: int,
    pages: KVPages,
    out: Tensor,
    window: int = 0,
    settings: ChunkSettings | None = None,
) -> None:
    """Attend with the queries of `step.tiles`, cut for `settings.queries` queries a tile.

    q, out: bfloat16 [tokens, heads, head_dim]. `window`: how many positions a query sees, 0 for all.
    """
    settings = settings or chunk_settings(q.device)
    _, heads, head_dim = q.shape
    tma = settings.tma and pages.block_size % TILE == 0
    launch(
        _chunk,
        (step.tiles.shape[0], pages.num_kv_heads),
        *(q, pages.data, _page_rows(pages, TILE) if tma else pages.data, step.block_tables, step.query_start),
        *(step.context_lens, step.tiles, out),
        *(step.block_tables.stride(0), pages.block_stride, layer * pages.layer_stride, _scale(head_dim)),
        HEADS=heads,
        KV_HEADS=pages.num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=pages.block_size,
        SPLIT=SPLIT,
        TILE=TILE,
        ROWS=settings.rows,
        PADDED_GROUP=settings.rows // settings.queries(heads, pages.num_kv_heads),
        WINDOW=window,
        TMA=tma,
        num_warps=settings.num_warps * max(1, head_dim // 128),
        num_stages=settings.num_stages,
        enable_fp_fusion=False,
    )


def _scale(head_dim: int) -> float:
    """Return the factor of a score, an exponent of 2."""
    return head_dim**-0.5 * math.log2(math.e)


def _page_rows(pages: KVPages, count: int) -> TensorDescriptor:
    """Describe the pages as rows of head_dim, to load `count` rows at once."""
    num_rows = pages.data.numel() // pages.head_dim
    return TensorDescriptor(pages.data, [num_rows, pages.head_dim], [pages.head_dim, 1], [count, pages.head_dim])
