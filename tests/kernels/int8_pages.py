"""Pages of an int8 KV cache, written and read by code of their own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.kernels import references
from tests.kernels.attention_rows import LAYER, LAYERS, KvForm, Row
from tests.kernels.layouts import Array
from tests.kernels.references import BFLOAT16

PANEL = 32
FIXED = 2.0**-14
"""Of the largest number of a row: rounding queries and softmax weights to 16 bits."""


def rounded(x: Array) -> tuple[Array, Array]:
    """Bytes plus 128 of vectors [..., dim], and their scales [...]."""
    scales = np.abs(x).max(-1) / np.float32(127)
    steps = x / np.where(scales > 0, scales, 1)[..., None]
    with np.errstate(invalid="ignore"):
        return (np.rint(steps) + 128).astype(np.uint8), scales


def meaning(numbers: Array, scales: Array) -> Array:
    return ((numbers.astype(np.float32) - 128) * scales[..., None]).astype(np.float32)


def to_panels(numbers: Array, scales: Array, keys: bool) -> Array:
    """Numbers [blocks, size, kv_heads, dim] and scales without the last axis, as bytes [blocks, kv_heads, bytes]."""
    blocks, size, kv_heads, dim = numbers.shape
    panels = numbers.reshape(blocks, size // PANEL, PANEL, kv_heads, dim).transpose(0, 3, 1, 2, 4)
    if keys:
        quads = panels.reshape(blocks, kv_heads, -1, PANEL, dim // 4, 4).swapaxes(3, 4)
    else:
        quads = panels.reshape(blocks, kv_heads, -1, 8, 4, dim // PANEL, PANEL).transpose(0, 1, 2, 5, 3, 6, 4)
    ends = scales.reshape(blocks, size // PANEL, PANEL, kv_heads).transpose(0, 3, 1, 2)
    parts = (quads.reshape(blocks, kv_heads, -1, PANEL * dim), np.ascontiguousarray(ends).view(np.uint8))
    return np.concatenate(parts, -1).reshape(blocks, kv_heads, -1)


def from_panels(pages: Array, dim: int, keys: bool) -> tuple[Array, Array]:
    """The reverse."""
    blocks, kv_heads, _ = pages.shape
    panels = pages.reshape(blocks, kv_heads, -1, PANEL * (dim + 4))
    quads, ends = panels[..., : PANEL * dim], np.ascontiguousarray(panels[..., PANEL * dim :]).view(np.float32)
    if keys:
        numbers = quads.reshape(blocks, kv_heads, -1, dim // 4, PANEL, 4).swapaxes(3, 4)
    else:
        numbers = quads.reshape(blocks, kv_heads, -1, dim // PANEL, 8, PANEL, 4).transpose(0, 1, 2, 4, 6, 3, 5)
    rows = numbers.reshape(blocks, kv_heads, -1, dim).transpose(0, 2, 1, 3)
    return rows, ends.reshape(blocks, kv_heads, -1).swapaxes(1, 2)


def int8_cache_of(rows: Sequence[Row], size: int, seed: int) -> tuple[Array, Array]:
    """As `cache_of`, rounded: unwritten numbers are arbitrary, and their scales NaN."""
    _, kv_heads, dim = rows[0].keys.shape
    needs = [-(-len(row.keys) // size) for row in rows]
    rng = np.random.default_rng(seed)
    ids = np.split(1 + rng.permutation(sum(needs)), np.cumsum(needs)[:-1])
    pages = np.full((sum(needs) + 2, LAYERS, 2, kv_heads, size * (dim + 4)), 0xFF, np.uint8)
    tables = np.zeros((len(rows), max(needs)), np.int32)
    for row, blocks, table in zip(rows, ids, tables, strict=True):
        table[: len(blocks)] = blocks
        for half, x in enumerate((row.keys, row.values)):
            numbers = rng.integers(0, 256, (len(blocks) * size, kv_heads, dim), np.uint8)
            scales = np.full(numbers.shape[:-1], np.nan, np.float32)
            numbers[: len(x)], scales[: len(x)] = rounded(x)
            shape = (len(blocks), size, kv_heads)
            pages[blocks, LAYER, half] = to_panels(numbers.reshape(*shape, dim), scales.reshape(shape), half == 0)
    return pages, tables


def as_kept(row: Row) -> Row:
    """The row with the keys and values that its cache stands for."""
    return Row(row.first, row.queries, meaning(*rounded(row.keys)), meaning(*rounded(row.values)))


def _wanted(row: Row) -> tuple[Array, Array]:
    """Only the result is rounded to bfloat16."""
    kept = as_kept(row)
    wanted = references.attention(kept.queries, kept.keys, kept.values, kept.first)
    spread = references.attention(kept.queries, kept.keys, np.abs(kept.values), kept.first)
    score_error = FIXED * np.abs(row.queries).max() * np.abs(kept.keys).max() * row.queries.shape[-1] ** 0.5
    weight_error = FIXED * np.abs(kept.values).max() * 4
    return wanted, 1.02 * BFLOAT16 * np.abs(wanted) + 2 * score_error * spread + weight_error


INT8_KV = KvForm(int8_cache_of, _wanted)
