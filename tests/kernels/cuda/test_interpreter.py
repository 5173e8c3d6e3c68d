"""What the mended interpreter computes: the same as a card."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.kernels.cuda.devices import DEVICE


@triton.jit
def _cast(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


@triton.jit
def _largest(x, y, out, n, N: tl.constexpr):
    at = tl.arange(0, N)
    best = tl.full([N], -1, tl.bfloat16).to(tl.float32)
    for _ in range(0, n):
        best = tl.maximum(best, tl.maximum(tl.load(x + at), tl.load(y + at)))
    tl.store(out + at, best)


@triton.jit
def _multiply(x, y, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    depths = tl.arange(0, K)
    left = tl.load(x + rows[:, None] * K + depths[None, :])
    right = tl.load(y + columns[:, None] * K + depths[None, :])
    total = tl.dot(left, tl.trans(right), out_dtype=out.dtype.element_ty)
    tl.store(out + rows[:, None] * N + columns[None, :], total)


@triton.jit
def _copy_tile(x, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    tile = x.load([tl.program_id(0) * ROWS, 0])
    at = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out + at, tile)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_floats_are_rounded_to_even(dtype: torch.dtype) -> None:
    x = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1.0625, 1.1875, -0.0, 2**-9, -300.0, 0.1], device=DEVICE)
    out = torch.empty(8, dtype=dtype, device=DEVICE)
    _cast[(1,)](x, out, N=8)
    assert out.float().tolist() == x.to(dtype).float().tolist()
    back = torch.empty(8, device=DEVICE)
    _cast[(1,)](out, back, N=8)
    assert back.tolist() == out.float().tolist()


def test_integers_become_bf16() -> None:
    x = torch.arange(-8, 8, dtype=torch.int8, device=DEVICE)
    out = torch.empty(16, dtype=torch.bfloat16, device=DEVICE)
    _cast[(1,)](x, out, N=16)
    assert out.tolist() == x.float().tolist()


def test_a_number_beats_nan() -> None:
    x = torch.tensor([float("nan"), 3, -7, 0.5], device=DEVICE)
    y = torch.tensor([2, float("nan"), -5, 4], device=DEVICE)
    out = torch.empty(4, device=DEVICE)
    _largest[(1,)](x, y, out, 2, N=4)
    assert out.tolist() == [2, 3, -1, 4]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_products_do_not_depend_on_tiles(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y = ((9 * torch.randn(m, 32, device=DEVICE)).to(dtype) for m in (16, 32))
    wide = torch.int32 if dtype == torch.int8 else torch.float32
    out, turned = (torch.empty(m, n, dtype=wide, device=DEVICE) for m, n in ((16, 32), (32, 16)))
    _multiply[(1,)](x, y, out, M=16, N=32, K=32)
    _multiply[(1,)](y, x, turned, M=32, N=16, K=32)
    assert torch.equal(out, turned.T)
    torch.testing.assert_close(out.double(), x.double() @ y.double().T, rtol=1e-5, atol=1e-4)


def test_descriptors_load_zeros_outside() -> None:
    x = torch.randn(5, 16, device=DEVICE).bfloat16()
    out = torch.full((8, 32), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    _copy_tile[(2,)](TensorDescriptor(x, [5, 16], [16, 1], [4, 32]), out, ROWS=4, COLUMNS=32)
    want = torch.zeros(8, 32, dtype=torch.bfloat16, device=DEVICE)
    want[:5, :16] = x
    assert torch.equal(out, want)
