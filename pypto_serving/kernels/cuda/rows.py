"""Kernels that work row by row: embedding, residual sums with RMSNorm, and the heads of attention.

What a row gets depends on that row alone. Sums of products come in splits, which are added in order. All is computed
in float32 and never fused.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pypto_serving.kernels.cuda.launch import launch, power_of_two
from pypto_serving.kernels.cuda.step import DispatchTensors, KVPages
from pypto_serving.util import ceil_div

_HEADS_AT_ONCE = 4


@triton.jit
def _embed(token_ids, last_tokens, table, x, hidden, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ids + row)
    last = tl.load(last_tokens + (-1 - token), mask=token < 0, other=0)
    token = tl.maximum(tl.where(token < 0, last, token), 0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    live = columns < hidden
    values = tl.load(table + token * hidden + columns, mask=live, other=0.0)
    tl.store(x + row * hidden + columns, values.to(tl.float32), mask=live)


def embed(token_ids: Tensor, last_tokens: Tensor, table: Tensor, x: Tensor) -> None:
    """Write the embedding of each token, bfloat16 `table` [vocab, hidden], to float32 `x` [m, hidden].

    An id t < 0 stands for `last_tokens[-1 - t]`; if that is negative too, for token 0.
    """
    hidden = x.shape[1]
    arguments = token_ids, last_tokens, table, x, hidden
    launch(_embed, (x.shape[0],), *arguments, BLOCK=power_of_two(hidden), num_warps=4)


@triton.jit(do_not_specialize=["num_rows"])
def _add_norm(
    x, sums, bias, weight, out, num_rows, hidden, eps, SPLITS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    live = columns < hidden
    scale = tl.load(weight + columns, mask=live, other=0.0).to(tl.float32)
    values = tl.load(x + row * hidden + columns, mask=live, other=0.0)
    if SPLITS > 0:
        added = tl.zeros([BLOCK], tl.float32)
        for split in tl.static_range(SPLITS):
            added += tl.load(sums + (split * num_rows + row) * hidden + columns, mask=live, other=0.0)
        if BIAS:
            added += tl.load(bias + columns, mask=live, other=0.0).to(tl.float32)
        values += added
        tl.store(x + row * hidden + columns, values, mask=live)
    norm = tl.rsqrt(tl.sum(values * values, 0) / hidden + eps)
    tl.store(out + row * hidden + columns, (values * norm * scale).to(tl.bfloat16), mask=live)


def add_norm(
    x: Tensor, sums: Tensor, num_splits: int, weight: Tensor, eps: float, out: Tensor, bias: Tensor | None = None
) -> None:
    """Add the splits of a product, and its bias, to `x`; write RMSNorm(x) * weight to `out`.

    x float32 [m, hidden]; sums float32 [num_splits, m, hidden], not read if `num_splits` is 0; weight and bias bfloat16
    [hidden]; out bfloat16 [m, hidden].
    """
    rows, hidden = x.shape
    launch(
        _add_norm,
        (rows,),
        *(x, sums, weight if bias is None else bias, weight, out, rows, hidden, eps),
        SPLITS=num_splits,
        BIAS=bias is not None,
        BLOCK=power_of_two(hidden),
        num_warps=8,
        enable_fp_fusion=False,
    )


@triton.jit
def _gather(x, indices, out, hidden, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(indices + row).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    live = columns < hidden
    tl.store(out + row * hidden + columns, tl.load(x + source * hidden + columns, mask=live), mask=live)


def gather(x: Tensor, indices: Tensor, out: Tensor) -> None:
    """Copy the rows `indices` of `x` to `out`, both bfloat16 [..., hidden]."""
    hidden = x.shape[1]
    launch(_gather, (out.shape[0],), x, indices, out, hidden, BLOCK=power_of_two(hidden), num_warps=4)


@triton.jit(do_not_specialize=["num_tokens"])
def _split_heads(
    sums,
    norms,
    bias,
    cos,
    sin,
    positions,
    slots,
    q,
    pages,
    num_tokens,
    eps,
    block_stride,
    layer_offset,
    SPLITS: tl.constexpr,
    NORMS: tl.constexpr,
    BIAS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Make COUNT heads of a token; heads are numbered queries first, then keys, then values."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    HALF: tl.constexpr = HEAD_DIM // 2
    pairs = tl.arange(0, HALF)
    live = (heads < HEADS + 2 * KV_HEADS)[:, None]
    columns = heads[:, None] * HEAD_DIM + pairs[None, :]
    first = tl.zeros([COUNT, HALF], tl.float32)
    second = tl.zeros([COUNT, HALF], tl.float32)
    for split in tl.static_range(SPLITS):
        at = sums + (split * num_tokens + token) * WIDTH + columns
        first += tl.load(at, mask=live, other=0.0)
        second += tl.load(at + HALF, mask=live, other=0.0)
    if BIAS:
        first += tl.load(bias + columns, mask=live, other=0.0).to(tl.float32)
        second += tl.load(bias + columns + HALF, mask=live, other=0.0).to(tl.float32)
    x, y = first, second
    if NORMS:
        at = norms + (heads >= HEADS).to(tl.int32)[:, None] * HEAD_DIM + pairs[None, :]
        norm = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / HEAD_DIM + eps)[:, None]
        x = x * norm * tl.load(at).to(tl.float32)
        y = y * norm * tl.load(at + HALF).to(tl.float32)
    position = tl.load(positions + token).to(tl.int64)
    c = tl.load(cos + position * HALF + pairs)[None, :]
    s = tl.load(sin + position * HALF + pairs)[None, :]
    is_value = (heads >= HEADS + KV_HEADS)[:, None]
    first = tl.where(is_value, first, x * c - y * s).to(tl.bfloat16)
    second = tl.where(is_value, second, y * c + x * s).to(tl.bfloat16)
    is_query = (heads < HEADS)[:, None]
    to_q = q + token * (HEADS * HEAD_DIM) + columns
    tl.store(to_q, first, mask=is_query)
    tl.store(to_q + HALF, second, mask=is_query)
    slot = tl.load(slots + token).to(tl.int64)
    to_pages = pages + slot // BLOCK_SIZE * block_stride + layer_offset + slot % BLOCK_SIZE * HEAD_DIM
    to_pages += (heads - HEADS)[:, None] * (BLOCK_SIZE * HEAD_DIM) + pairs[None, :]
    tl.store(to_pages, first, mask=live & (heads >= HEADS)[:, None])
    tl.store(to_pages + HALF, second, mask=live & (heads >= HEADS)[:, None])


def split_heads(
    sums: Tensor,
    num_splits: int,
    step: DispatchTensors,
    layer: int,
    pages: KVPages,
    q: Tensor,
    norms: Tensor | None,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> None:
    """Make queries, keys and values of a product: add its splits and bias, normalise, rotate by the position.

    sums float32 [num_splits, m, (heads + 2 * kv heads) * head_dim]; q bfloat16 [m, heads, head_dim]. Keys and values go
    to the token's slot in `pages`. norms: bfloat16 [2, head_dim], weights for queries and keys, or None. bias:
    bfloat16, or None. cos, sin: float32 [positions, head_dim / 2]; RoPE rotates the halves of a head.
    """
    tokens, heads, head_dim = q.shape
    launch(
        _split_heads,
        (tokens, ceil_div(heads + 2 * pages.num_kv_heads, _HEADS_AT_ONCE)),
        *(sums, sums if norms is None else norms, sums if bias is None else bias, cos, sin),
        *(step.positions, step.slots, q, pages.data, tokens, eps, pages.block_stride, layer * pages.layer_stride),
        SPLITS=num_splits,
        NORMS=norms is not None,
        BIAS=bias is not None,
        HEADS=heads,
        KV_HEADS=pages.num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=pages.block_size,
        COUNT=_HEADS_AT_ONCE,
        num_warps=1,
        enable_fp_fusion=False,
    )
