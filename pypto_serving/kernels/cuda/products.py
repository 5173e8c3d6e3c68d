"""Multiply rows by bf16 matrices, with sums that do not depend on how many rows there are.

The sum over k has `splits` parts, a number that follows from the shape of the matrix. A part is one chain of float32
sums in the order of k. All tiles keep that chain: whichever is chosen, the bits of a row stay.
With few rows the weights are the rows of the matrix instructions, and the parts are written apart for the next kernel
to add. With many rows a program adds the parts itself, in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from pypto_serving.kernels.cuda import tiles
from pypto_serving.kernels.cuda.launch import launch
from pypto_serving.kernels.cuda.tiles import Tile
from pypto_serving.util import ceil_div

GROUP = 8  # tiles of rows whose programs run together and share weights in the L2 cache


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows(
    x,
    w,
    sums,
    num_rows,
    n,
    k,
    split_length,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BULK: tl.constexpr,
    WHOLE_N: tl.constexpr,
    WHOLE_K: tl.constexpr,
):
    """Write sums[split, row, column]. If BULK, x and w are descriptors."""
    first_row = tl.program_id(0) * ROWS
    first_column = tl.program_id(1) * COLUMNS
    split = tl.program_id(2)
    rows = first_row + tl.arange(0, ROWS)
    columns = first_column + tl.arange(0, COLUMNS)
    first = split * split_length
    length = min(split_length, k - first)
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    if BULK:
        for depth in range(0, length, DEPTH):
            values = x.load([first_row, first + depth])
            weights = w.load([first_column, first + depth])
            total = tl.dot(weights, tl.trans(values), total)
    else:
        depths = tl.arange(0, DEPTH)
        x_at = x + rows[:, None].to(tl.int64) * k + (first + depths)[None, :]
        w_at = w + columns[:, None].to(tl.int64) * k + (first + depths)[None, :]
        for depth in range(0, length, DEPTH):
            values = tl.load(x_at, mask=mask_of(rows < num_rows, depth + depths < length, False, WHOLE_K), other=0.0)
            if WHOLE_N and WHOLE_K:
                weights = tl.load(w_at)
            else:
                weights = tl.load(w_at, mask=mask_of(columns < n, depth + depths < length, WHOLE_N, WHOLE_K), other=0.0)
            total = tl.dot(weights, tl.trans(values), total)
            x_at += DEPTH
            w_at += DEPTH
    out = sums + (split * num_rows + rows)[None, :].to(tl.int64) * n + columns[:, None]
    tl.store(out, total, mask=mask_of(columns < n, rows < num_rows, WHOLE_N, False))


@triton.jit
def mask_of(first, second, FIRST_WHOLE: tl.constexpr, SECOND_WHOLE: tl.constexpr):
    """Return the mask of a tile from those of its two axes, without an axis that needs none."""
    if FIRST_WHOLE:
        mask = second[None, :]
    elif SECOND_WHOLE:
        mask = first[:, None]
    else:
        mask = first[:, None] & second[None, :]
    return mask


@triton.jit
def place_of(program, num_rows, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Return the first row and column of a program's tile: groups of tiles of rows, within one column after column."""
    row_tiles = tl.cdiv(num_rows, ROWS)
    group_programs = GROUP * tl.cdiv(n, COLUMNS)
    first_tile = program // group_programs * GROUP
    size = min(row_tiles - first_tile, GROUP)
    within = program % group_programs
    return (first_tile + within % size) * ROWS, within // size * COLUMNS


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _many_rows(
    x,
    w,
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
    ONE_SPLIT: tl.constexpr,
):
    """Write sums[row, column], all splits added. x and w are descriptors."""
    first_row, first_column = place_of(tl.program_id(0), num_rows, n, ROWS, COLUMNS, GROUP)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if ONE_SPLIT:
        for depth in range(0, k, DEPTH):
            values = x.load([first_row, depth])
            weights = w.load([first_column, depth])
            total = tl.dot(values, tl.trans(weights), total)
    else:
        for split in range(num_splits):
            part = tl.zeros_like(total)
            first = split * split_length
            for depth in range(first, min(first + split_length, k), DEPTH):
                values = x.load([first_row, depth])
                weights = w.load([first_column, depth])
                part = tl.dot(values, tl.trans(weights), part)
            total += part
    rows = first_row + tl.arange(0, ROWS)
    columns = first_column + tl.arange(0, COLUMNS)
    out = sums + rows[:, None].to(tl.int64) * n + columns[None, :]
    tl.store(out, total, mask=(rows < num_rows)[:, None] & (columns < n)[None, :])


@triton.jit
def silu_times(gate, up):
    """Return silu(gate) * up in bf16."""
    return (gate * (1.0 / (1.0 + tl.exp(-gate))) * up).to(tl.bfloat16)


@triton.jit(do_not_specialize=["num_rows"])
def _gated_few_rows(
    x,
    w,
    out,
    num_rows,
    n,
    k,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BULK: tl.constexpr,
    WHOLE_N: tl.constexpr,
    WHOLE_K: tl.constexpr,
):
    """Write out[row, column] = silu(x . w[column]) * (x . w[n + column]). If BULK, x and w are descriptors."""
    first_row = tl.program_id(0) * ROWS
    first_column = tl.program_id(1) * COLUMNS
    rows = first_row + tl.arange(0, ROWS)
    columns = first_column + tl.arange(0, COLUMNS)
    if BULK:
        gate = tl.zeros([COLUMNS, ROWS], tl.float32)
        up = tl.zeros([COLUMNS, ROWS], tl.float32)
        for depth in range(0, k, DEPTH):
            values = tl.trans(x.load([first_row, depth]))
            gate = tl.dot(w.load([first_column, depth]), values, gate)
            up = tl.dot(w.load([n + first_column, depth]), values, up)
    else:
        # One product of both: eight rows of the gate, eight of up, and so on, so that a thread gets both sums.
        places = tl.arange(0, 2 * COLUMNS)
        pairs = first_column + places // 16 * 8 + places % 8
        depths = tl.arange(0, DEPTH)
        x_at = x + rows[:, None].to(tl.int64) * k + depths[None, :]
        w_at = w + (pairs + places // 8 % 2 * n)[:, None].to(tl.int64) * k + depths[None, :]
        total = tl.zeros([2 * COLUMNS, ROWS], tl.float32)
        for depth in range(0, k, DEPTH):
            live = depth + depths < k
            values = tl.load(x_at, mask=mask_of(rows < num_rows, live, False, WHOLE_K), other=0.0)
            if WHOLE_N and WHOLE_K:
                weights = tl.load(w_at)
            else:
                weights = tl.load(w_at, mask=mask_of(pairs < n, live, WHOLE_N, WHOLE_K), other=0.0)
            total = tl.dot(weights, tl.trans(values), total)
            x_at += DEPTH
            w_at += DEPTH
        gate, up = tl.split(tl.permute(tl.reshape(total, [COLUMNS // 8, 2, 8, ROWS]), [0, 2, 3, 1]))
        gate = tl.reshape(gate, [COLUMNS, ROWS])
        up = tl.reshape(up, [COLUMNS, ROWS])
    at = out + rows[None, :].to(tl.int64) * n + columns[:, None]
    tl.store(at, silu_times(gate, up), mask=mask_of(columns < n, rows < num_rows, WHOLE_N, False))


@triton.jit(do_not_specialize=["num_rows"])
def _gated_many_rows(
    x, w, out, num_rows, n, k, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr
):
    """Do what _gated_few_rows does, with x as the rows of the instructions. x and w are descriptors."""
    first_row, first_column = place_of(tl.program_id(0), num_rows, n, ROWS, COLUMNS, GROUP)
    gate = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for depth in range(0, k, DEPTH):
        values = x.load([first_row, depth])
        gate = tl.dot(values, tl.trans(w.load([first_column, depth])), gate)
        up = tl.dot(values, tl.trans(w.load([n + first_column, depth])), up)
    rows = first_row + tl.arange(0, ROWS)
    columns = first_column + tl.arange(0, COLUMNS)
    at = out + rows[:, None].to(tl.int64) * n + columns[None, :]
    tl.store(at, silu_times(gate, up), mask=(rows < num_rows)[:, None] & (columns < n)[None, :])


class DeviceWeights:
    """Weights on a device, [rows, k]."""

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights
        self.k = weights.shape[1]
        self.bulk = has_bulk_copies(weights.device)
        self._descriptors: dict[tuple[int, int], TensorDescriptor] = {}

    def operands(self, x: Tensor, tile: Tile) -> tuple[Tensor | TensorDescriptor, Tensor | TensorDescriptor]:
        """Return what the kernels of a tile take as x and w."""
        if not tile.bulk:
            return x, self.weights
        box = (tile.columns, tile.depth)
        if box not in self._descriptors:
            self._descriptors[box] = _descriptor(self.weights, *box)
        return _descriptor(x, tile.rows, tile.depth), self._descriptors[box]


class SplitMatrix(DeviceWeights):
    """A matrix [n, k] whose sums have `splits` parts, a function of (n, k)."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__(weights)
        self.n = weights.shape[0]
        self.splits = tiles.num_splits(self.n, self.k)

    def num_sums(self, rows: int) -> int:
        """Return how many float32 values multiply() writes at most for up to so many rows."""
        apart = min(rows, tiles.MAX_ROWS_APART) if self.bulk else rows
        return max(rows, apart * self.splits) * self.n

    def multiply(self, x: Tensor, sums: Tensor) -> int:
        """Write float32 [S, m, n] to `sums`, which its reader adds in order, for rows x, bf16 [m, k]. Return S."""
        raise NotImplementedError


class Bf16Matrix(SplitMatrix):
    """A bf16 matrix."""

    def multiply(self, x: Tensor, sums: Tensor) -> int:
        rows, length = len(x), tiles.split_length(self.k, self.splits)
        many = tiles.many_rows(self.n, self.splits, rows, self.bulk)
        tile = many or tiles.few_rows(self.n, self.k, self.splits, rows, self.bulk)
        shape = (*self.operands(x, tile), sums, rows, self.n, self.k, length)
        row_tiles, column_tiles = ceil_div(rows, tile.rows), ceil_div(self.n, tile.columns)
        if many:
            constants = {"GROUP": GROUP, "ONE_SPLIT": self.splits == 1} | constants_of(tile)
            launch(_many_rows, (row_tiles * column_tiles,), *shape, self.splits, **constants)
            return 1
        grid = (row_tiles, column_tiles, self.splits)
        launch(_few_rows, grid, *shape, BULK=tile.bulk, **constants_of(tile), **edges_of(tile, self.n, self.k))
        return self.splits


class GatedMatrix(DeviceWeights):
    """Two bf16 matrices on a device, [2 * n, k]: the rows of the gate come first."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__(weights)
        self.n = weights.shape[0] // 2

    def num_sums(self, rows: int) -> int:
        """Return how many float32 values of `sums` multiply() needs: none."""
        return 0

    def multiply(self, x: Tensor, out: Tensor, sums: Tensor | None = None) -> None:
        """Write silu(x . gate) * (x . up) to `out`, bf16 [m, n], for rows x, bf16 [m, k]. There is one split."""
        rows = len(x)
        many = tiles.gated_many_rows(rows, self.bulk)
        tile = many or tiles.gated_few_rows(self.n, self.k, rows, self.bulk)
        shape = (*self.operands(x, tile), out, rows, self.n, self.k)
        row_tiles, column_tiles = ceil_div(rows, tile.rows), ceil_div(self.n, tile.columns)
        constants = {"enable_fp_fusion": False} | constants_of(tile)
        if many:
            launch(_gated_many_rows, (row_tiles * column_tiles,), *shape, GROUP=GROUP, **constants)
        else:
            edges = edges_of(tile, self.n, self.k)
            launch(_gated_few_rows, (row_tiles, column_tiles), *shape, BULK=tile.bulk, **constants, **edges)


BULK_COPIES = (9, 0)
"""The oldest compute capability that copies tiles by descriptors."""


def has_bulk_copies(device: torch.device) -> bool:
    """Say whether a device copies tiles by descriptors. Triton's interpreter does."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= BULK_COPIES


def _descriptor(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), [tensor.shape[1], 1], [rows, columns])


def constants_of(tile: Tile) -> dict[str, int]:
    """Return what a tile is to a kernel."""
    return {
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def edges_of(tile: Tile, n: int, k: int) -> dict[str, bool]:
    """Say which edges of a matrix are edges of tiles."""
    return {"WHOLE_N": n % tile.columns == 0, "WHOLE_K": k % tile.depth == 0}
