"""Multiply bf16 rows by matrices of 4 bits in groups of 128, packed in the order in which a card multiplies.

A word holds the eight codes that one thread needs for one instruction of 64 outputs and 16 inputs, and the words of a
thread lie together. So weights go from memory to registers and are unpacked there, with no other thread's help.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pypto_serving.kernels.cuda import tiles
from pypto_serving.kernels.cuda.launch import launch
from pypto_serving.kernels.cuda.products import SplitMatrix, constants_of
from pypto_serving.util import ceil_div

GROUP_INPUTS = 128  # of a scale
OUTPUTS = 64  # of an instruction
_ASSEMBLY = not triton.knobs.runtime.interpret


@triton.jit
def _pair(word):
    """Return the two bf16 values of a word, the low one first."""
    low = (word & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (word >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _code(words, PLACE: tl.constexpr):
    return (((words >> (4 * PLACE)) & 15) - 8).to(tl.float32).to(tl.bfloat16)


@triton.jit
def _unpack(words, ASSEMBLY: tl.constexpr):
    """Return the bf16 values [64 outputs, 128 inputs] of words [2, 128 threads, 4 steps].

    Bits of bf16 with the exponent of 128 and a code at the end are 128 + code: two of them take three instructions.
    """
    if ASSEMBLY:
        first, second, third, fourth = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, one, offset;
            mov.b32 one, 0x3f803f80;
            mov.b32 offset, 0xc308c308;
            shr.u32 a, $4, 4;
            shr.u32 b, $4, 8;
            shr.u32 c, $4, 12;
            lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 $1, a, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 $2, b, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 $3, c, 0x000f000f, 0x43004300, 0xea;
            fma.rn.bf16x2 $0, $0, one, offset;
            fma.rn.bf16x2 $1, $1, one, offset;
            fma.rn.bf16x2 $2, $2, one, offset;
            fma.rn.bf16x2 $3, $3, one, offset;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [words],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        values = tl.join(tl.join(_pair(first), _pair(second)), tl.join(_pair(third), _pair(fourth)))
    else:
        first = tl.join(tl.join(_code(words, 0), _code(words, 4)), tl.join(_code(words, 1), _code(words, 5)))
        second = tl.join(tl.join(_code(words, 2), _code(words, 6)), tl.join(_code(words, 3), _code(words, 7)))
        values = tl.join(first, second)
    # half, warp, row of 8, pair of 4, step, value of the pair, eight rows further, eight inputs further
    values = tl.reshape(values, [2, 4, 8, 4, 4, 2, 2, 2])
    return tl.reshape(tl.permute(values, [1, 6, 2, 0, 4, 7, 3, 5]), [64, 128])


@triton.jit(do_not_specialize=["num_rows"])
def _int4_few_rows(
    x,
    words,
    scales,
    sums,
    num_rows,
    n,
    k,
    split_length,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Write sums[split, row, column]: sums of DEPTH products each, scaled by scales[group, column] and added."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column_tile = tl.program_id(1)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(2)
    first = split * split_length
    live = (rows < num_rows)[:, None]
    x_at = x + rows[:, None].to(tl.int64) * k + (first + tl.arange(0, DEPTH))[None, :]
    within = (
        tl.arange(0, 2)[:, None, None] * 512 + tl.arange(0, 128)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    )
    words_at = words + (column_tile * (k // DEPTH) + first // DEPTH).to(tl.int64) * 1024 + within
    scales_at = scales + first // DEPTH * n + columns
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for _ in range(0, min(split_length, k - first), DEPTH):
        weights = _unpack(tl.load(words_at), ASSEMBLY)
        values = tl.load(x_at, mask=live, other=0.0)
        total += tl.dot(weights, tl.trans(values)) * tl.load(scales_at)[:, None]
        x_at += DEPTH
        words_at += 1024
        scales_at += n
    out = sums + (split * num_rows + rows)[None, :].to(tl.int64) * n + columns[:, None]
    tl.store(out, total, mask=(rows < num_rows)[None, :])


def pack_int4(codes: Tensor) -> Tensor:
    """Pack integers from -8 to 7, [n, k], into int32 words [n / 64, k / 128, 2, 128, 4]. No edges: whole tiles only."""
    n, k = codes.shape
    if n % OUTPUTS or k % GROUP_INPUTS:
        raise ValueError(
            f"4-bit weights of {n} outputs and {k} inputs; multiples of {OUTPUTS} and {GROUP_INPUTS} are needed"
        )
    # column tile, warp, eight rows further, row of 8; group, half, step, eight inputs further, pair of 4, value of it
    parts = (codes.to(torch.int32) + 8).view(n // 64, 4, 2, 8, k // 128, 2, 4, 2, 4, 2)
    places = parts.permute(0, 4, 5, 1, 3, 8, 6, 9, 7, 2).reshape(n // 64, k // 128, 2, 128, 4, 8)
    words = places[..., 0].clone()
    for place in range(1, 8):
        words |= places[..., place] << (4 * place)
    return words


class Int4Matrix(SplitMatrix):
    """A matrix [n, k] of packed codes, with a scale for a group of inputs of an output: float32 [n, k / 128]."""

    def __init__(self, words: Tensor, scales: Tensor) -> None:
        super().__init__(words)
        self.n, groups = scales.shape
        self.k = groups * GROUP_INPUTS
        self.splits = tiles.num_splits(self.n, self.k)
        self.scales = scales.T.contiguous()

    def num_sums(self, rows: int) -> int:
        """Return how many float32 values multiply() writes for so many rows."""
        return rows * self.splits * self.n

    def multiply(self, x: Tensor, sums: Tensor) -> int:
        rows = len(x)
        tile = tiles.int4_rows(rows, self.bulk)
        grid = (ceil_div(rows, tile.rows), self.n // tile.columns, self.splits)
        shape = (rows, self.n, self.k, tiles.split_length(self.k, self.splits))
        constants = {"ASSEMBLY": _ASSEMBLY, "enable_fp_fusion": False} | constants_of(tile)
        launch(_int4_few_rows, grid, x, self.weights, self.scales, sums, *shape, **constants)
        return self.splits
