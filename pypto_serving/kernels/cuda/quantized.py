"""Multiply rows by int8 and FP8 matrices. Rows are quantised first; sums keep their bits as in products.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pypto_serving.kernels.cuda import tiles
from pypto_serving.kernels.cuda.launch import launch, power_of_two
from pypto_serving.kernels.cuda.products import (
    GROUP,
    SplitMatrix,
    constants_of,
    edges_of,
    mask_of,
    place_of,
    silu_times,
)
from pypto_serving.kernels.cuda.tiles import Tile
from pypto_serving.util import ceil_div

SPAN = 128  # values of a row, and rows and values of FP8 weights, that share a scale
_SPANS = 8  # of a program that quantises rows to FP8


@triton.jit
def _round_to_int8(x, codes, scales, k, BLOCK: tl.constexpr):
    """Write codes of a row between -127 and 127, and the value of 1."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    values = tl.load(x + row * k + at, mask=at < k, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values))
    turns = values * tl.where(largest > 0, 127.0 / largest, 0.0)
    nearest = (turns + 12582912.0) - 12582912.0  # 1.5 * 2 ** 23: what a sum there leaves is an integer
    tl.store(codes + row * k + at, nearest.to(tl.int8), mask=at < k)
    tl.store(scales + row, largest / 127.0)


@triton.jit(do_not_specialize=["num_rows"])
def _round_to_fp8(x, codes, scales, num_rows, k, SPANS: tl.constexpr, SPAN: tl.constexpr):
    """Write FP8 codes of a row, and scales[span, row]."""
    row = tl.program_id(0).to(tl.int64)
    spans = tl.program_id(1) * SPANS + tl.arange(0, SPANS)
    at = spans[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    values = tl.load(x + row * k + at, mask=at < k, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values), axis=1)
    turns = values * tl.where(largest > 0, 448.0 / largest, 0.0)[:, None]
    tl.store(codes + row * k + at, turns.to(tl.float8e4nv), mask=at < k)
    tl.store(scales + spans * num_rows + row, largest / 448.0, mask=spans * SPAN < k)


@triton.jit(do_not_specialize=["num_rows"])
def _rounded_few_rows(
    x,
    w,
    x_scales,
    w_scales,
    sums,
    num_rows,
    n,
    k,
    split_length,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    WHOLE_N: tl.constexpr,
    WHOLE_K: tl.constexpr,
    SPANS: tl.constexpr,
):
    """Write sums[split, row, column]: exact int32 sums, scaled by row and column.

    If SPANS, DEPTH values share a scale: their sums are scaled and added in float32.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(2)
    depths = tl.arange(0, DEPTH)
    first = split * split_length
    length = min(split_length, k - first)
    x_at = x + rows[:, None].to(tl.int64) * k + (first + depths)[None, :]
    w_at = w + columns[:, None].to(tl.int64) * k + (first + depths)[None, :]
    if SPANS:
        span = first // DEPTH
        x_scales += span * num_rows + rows
        w_scales += tl.program_id(1) * COLUMNS // DEPTH * tl.cdiv(k, DEPTH) + span
        total = tl.zeros([COLUMNS, ROWS], tl.float32)
    else:
        total = tl.zeros([COLUMNS, ROWS], tl.int32)
    for depth in range(0, length, DEPTH):
        values = tl.load(x_at, mask=mask_of(rows < num_rows, depth + depths < length, False, WHOLE_K), other=0.0)
        if WHOLE_N and WHOLE_K:
            weights = tl.load(w_at)
        else:
            weights = tl.load(w_at, mask=mask_of(columns < n, depth + depths < length, WHOLE_N, WHOLE_K), other=0.0)
        if SPANS:
            scales = tl.load(x_scales, mask=rows < num_rows, other=0.0) * tl.load(w_scales)
            total += tl.dot(weights, tl.trans(values)) * scales[None, :]
            x_scales += num_rows
            w_scales += 1
        else:
            total = tl.dot(weights, tl.trans(values), total, out_dtype=tl.int32)
        x_at += DEPTH
        w_at += DEPTH
    if not SPANS:
        row_scales = tl.load(x_scales + rows, mask=rows < num_rows, other=0.0)
        column_scales = tl.load(w_scales + columns, mask=columns < n, other=0.0)
        total = total.to(tl.float32) * row_scales[None, :] * column_scales[:, None]
    out = sums + (split * num_rows + rows)[None, :].to(tl.int64) * n + columns[:, None]
    tl.store(out, total, mask=mask_of(columns < n, rows < num_rows, WHOLE_N, False))


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _rounded_many_rows(
    x,
    w,
    x_scales,
    w_scales,
    sums,
    num_rows,
    n,
    k,
    split_length,
    num_splits,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    SPANS: tl.constexpr,
):
    """Write sums[row, column], all splits added. x and w are descriptors. SPANS as in _rounded_few_rows."""
    first_row, first_column = place_of(tl.program_id(0), num_rows, n, ROWS, COLUMNS, GROUP)
    rows = first_row + tl.arange(0, ROWS)
    columns = first_column + tl.arange(0, COLUMNS)
    if SPANS:
        w_scales += first_column // DEPTH * tl.cdiv(k, DEPTH)
    else:
        row_scales = tl.load(x_scales + rows, mask=rows < num_rows, other=0.0)
        column_scales = tl.load(w_scales + columns, mask=columns < n, other=0.0)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for split in range(num_splits):
        part = tl.zeros([ROWS, COLUMNS], tl.float32 if SPANS else tl.int32)
        first = split * split_length
        for depth in range(first, min(first + split_length, k), DEPTH):
            values = x.load([first_row, depth])
            weights = w.load([first_column, depth])
            if SPANS:
                span = depth // DEPTH
                scales = tl.load(x_scales + span * num_rows + rows, mask=rows < num_rows, other=0.0)
                scales *= tl.load(w_scales + span)
                part += tl.dot(values, tl.trans(weights)) * scales[:, None]
            else:
                part = tl.dot(values, tl.trans(weights), part, out_dtype=tl.int32)
        total += part if SPANS else part.to(tl.float32) * row_scales[:, None] * column_scales[None, :]
    out = sums + rows[:, None].to(tl.int64) * n + columns[None, :]
    tl.store(out, total, mask=(rows < num_rows)[:, None] & (columns < n)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _gate(sums, out, num_rows, n, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Write out[row] = silu(gate) * up, where gate and up are the halves of a row of 2 * n sums."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    gate = tl.load(sums + row * 2 * n + at, mask=live, other=0.0)
    up = tl.load(sums + row * 2 * n + n + at, mask=live, other=0.0)
    for split in tl.static_range(1, SPLITS):
        first = sums + (split * num_rows + row) * 2 * n + at
        gate += tl.load(first, mask=live, other=0.0)
        up += tl.load(first + n, mask=live, other=0.0)
    tl.store(out + row * n + at, silu_times(gate, up), mask=live)


class RoundedRows:
    """Room for quantised rows and their scales, on a device. All matrices of a model may share one."""

    def __init__(self, num_rows: int, k: int, device: torch.device) -> None:
        self.codes = torch.empty(num_rows * k, dtype=torch.int8, device=device)
        self.scales = torch.empty(num_rows * ceil_div(k, SPAN), dtype=torch.float32, device=device)


class _RoundedMatrix(SplitMatrix):
    """A matrix [n, k] of 8 bits whose products quantise the rows. `spans`: 128 values share a scale, not all."""

    spans: bool

    def __init__(self, weights: Tensor, scales: Tensor, rounded: RoundedRows) -> None:
        super().__init__(weights)
        self.scales, self._rounded = scales, rounded

    def multiply(self, x: Tensor, sums: Tensor) -> int:
        rows, length = len(x), tiles.split_length(self.k, self.splits)
        codes = self._rounded.codes[: rows * self.k].view(self.weights.dtype).view(rows, self.k)
        self._round(x, codes)
        many = tiles.rounded_many_rows(rows, self.bulk)
        tile = many or self._tile(rows, length)
        shape = (self._rounded.scales, self.scales, sums, rows, self.n, self.k, length)
        row_tiles, column_tiles = ceil_div(rows, tile.rows), ceil_div(self.n, tile.columns)
        constants = {"SPANS": self.spans, "enable_fp_fusion": False} | constants_of(tile)
        operands = self.operands(codes, tile)
        if many:
            grid = (row_tiles * column_tiles,)
            launch(_rounded_many_rows, grid, *operands, *shape, self.splits, GROUP=GROUP, **constants)
            return 1
        edges = edges_of(tile, self.n, self.k)
        launch(_rounded_few_rows, (row_tiles, column_tiles, self.splits), *operands, *shape, **constants, **edges)
        return self.splits

    def _round(self, x: Tensor, codes: Tensor) -> None:
        raise NotImplementedError

    def _tile(self, rows: int, length: int) -> Tile:
        raise NotImplementedError


class Int8Matrix(_RoundedMatrix):
    """An int8 matrix [n, k] with a float32 scale an output. Rows get int8 codes and a scale each."""

    spans = False

    def _round(self, x: Tensor, codes: Tensor) -> None:
        block = power_of_two(self.k)
        launch(
            _round_to_int8,
            (len(x),),
            x,
            codes,
            self._rounded.scales,
            self.k,
            BLOCK=block,
            num_warps=min(8, block >> 9 or 1),
        )

    def _tile(self, rows: int, length: int) -> Tile:
        return tiles.int8_few_rows(length, rows)


class Fp8Matrix(_RoundedMatrix):
    """An FP8 (E4M3) matrix [n, k] with a float32 scale for 128 x 128 values. Rows get a scale for 128 values."""

    spans = True

    def _round(self, x: Tensor, codes: Tensor) -> None:
        grid = (len(x), ceil_div(self.k, _SPANS * SPAN))
        launch(
            _round_to_fp8, grid, x, codes, self._rounded.scales, len(x), self.k, SPANS=_SPANS, SPAN=SPAN, num_warps=4
        )

    def _tile(self, rows: int, length: int) -> Tile:
        return tiles.fp8_few_rows(rows)


class GatedSums:
    """A gated product from any matrix [2 * n, k] whose first half is the gate, through sums in memory."""

    def __init__(self, matrix: SplitMatrix) -> None:
        self.n, self._matrix = matrix.n // 2, matrix
        self.num_sums = matrix.num_sums

    def multiply(self, x: Tensor, out: Tensor, sums: Tensor) -> None:
        """Write silu(x . gate) * (x . up) to `out`, bf16 [m, n], for rows x, bf16 [m, k]. `sums` is overwritten."""
        splits = self._matrix.multiply(x, sums)
        grid = (len(x), ceil_div(self.n, 1024))
        launch(_gate, grid, sums, out, len(x), self.n, SPLITS=splits, BLOCK=1024, enable_fp_fusion=False)
