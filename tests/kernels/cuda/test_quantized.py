"""Products of rows and matrices of 8 bits: near those of the rounded values, with bits that no other row changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pypto_serving.kernels.cuda.quantized import SPAN, Fp8Matrix, GatedSums, Int8Matrix, RoundedRows
from tests.kernels.cuda.devices import DEVICE
from tests.kernels.cuda.multiplying import CARD, product, random

CASES = [(16, 16, 1), (80, 560, 21), (144, 128, 70), (80, 560, 260)]  # n, k, rows
CASES += CARD * [(n, k, rows) for n, k in [(4096, 1024), (4096, 12288)] for rows in (1, 24, 64, 128, 256, 300)]
FP8 = not CARD or torch.cuda.get_device_capability() >= (8, 9)


def room(k: int) -> RoundedRows:
    rounded = RoundedRows(300, k, DEVICE)
    rounded.codes.fill_(0x7F)  # NaN in FP8
    rounded.scales.fill_(float("nan"))
    return rounded


def int8_matrix(n: int, k: int) -> tuple[Int8Matrix | Fp8Matrix, Tensor]:
    """Return a matrix and its values."""
    codes = torch.randint(-127, 128, (n, k), generator=torch.Generator().manual_seed(0)).to(torch.int8).to(DEVICE)
    scales = (0.5 + torch.rand(n, generator=torch.Generator().manual_seed(1)).to(DEVICE)) / 100
    return Int8Matrix(codes, scales, room(k)), codes.double() * scales[:, None]


def fp8_matrix(n: int, k: int) -> tuple[Int8Matrix | Fp8Matrix, Tensor]:
    """Return a matrix and its values."""
    codes = (100 * random(n, k)).clamp(-448, 448).to(torch.float8_e4m3fn)
    shape = (-(-n // SPAN), -(-k // SPAN))
    scales = (0.5 + torch.rand(*shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)) / 100
    wide = scales.repeat_interleave(SPAN, 0).repeat_interleave(SPAN, 1)[:n, :k]
    return Fp8Matrix(codes, scales, room(k)), codes.double() * wide


def rounded(matrix: Int8Matrix | Fp8Matrix, rows: int) -> Tensor:
    """Return the values of the rows that a product rounded last."""
    room, k = matrix._rounded, matrix.k
    codes = room.codes[: rows * k].view(matrix.weights.dtype).view(rows, k).double()
    if isinstance(matrix, Int8Matrix):
        return codes * room.scales[:rows, None]
    spans = -(-k // SPAN)
    return codes * room.scales[: spans * rows].view(spans, rows).T.repeat_interleave(SPAN, 1)[:, :k]


MATRICES = [int8_matrix] + FP8 * [fp8_matrix]
Maker = Callable[[int, int], tuple[Int8Matrix | Fp8Matrix, Tensor]]


@pytest.mark.parametrize(("n", "k", "rows"), CASES)
@pytest.mark.parametrize("make", MATRICES)
def test_products_are_right(make: Maker, n: int, k: int, rows: int) -> None:
    (matrix, values), x = make(n, k), random(rows, k, seed=1)
    x[0, :SPAN] *= 16
    got = product(matrix, x).double()
    near = rounded(matrix, rows)
    error, sizes = (got - near @ values.T).abs(), near.abs() @ values.abs().T
    assert (error <= (2e-3 if CARD else 2e-6) * sizes).all()  # FP8 sums lose bits on a card
    if isinstance(matrix, Int8Matrix):
        assert (2 * (near - x).abs() <= 1.01 * x.abs().amax(dim=1, keepdim=True) / 127).all()
    else:
        assert ((near - x).abs() <= x.abs() / 16 + 1e-3).all()


@pytest.mark.parametrize("make", MATRICES)
@pytest.mark.parametrize("shape", [(80, 560)] + CARD * [(1024, 3072), (4096, 4096)])
def test_bits_do_not_depend_on_the_number_of_rows(make: Maker, shape: tuple[int, int]) -> None:
    (matrix, _), x = make(*shape), random(260, shape[1], seed=1)
    want = product(matrix, x)
    for first, end in [(0, 1), (2, 19), (3, 40), (10, 90)]:
        assert torch.equal(product(matrix, x[first:end].contiguous()), want[first:end])


def test_rows_of_zeros_give_zeros() -> None:
    for make in MATRICES:
        assert not product(make(16, 144)[0], torch.zeros(3, 144, dtype=torch.bfloat16, device=DEVICE)).any()


@pytest.mark.parametrize("rows", [1, 19])
def test_gates_come_from_sums(rows: int) -> None:
    (matrix, values), x = int8_matrix(96, 560), random(rows, 560, seed=1) / 8
    assert matrix.splits == 2
    gate, up = (x.double() @ values.T).chunk(2, dim=1)
    out = torch.full((rows + 1, 48), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    gated = GatedSums(matrix)
    gated.multiply(x, out[:-1], torch.full((gated.num_sums(rows),), float("nan"), device=DEVICE))
    want = torch.nn.functional.silu(gate) * up
    assert ((out[:-1].double() - want).abs() <= 0.05 * want.abs() + 0.3).all() and torch.isnan(out[-1]).all()
