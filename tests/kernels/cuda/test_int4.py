"""Products of bf16 rows and matrices of 4 bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pypto_serving.kernels.cuda.int4 import Int4Matrix, pack_int4
from tests.kernels.cuda.devices import DEVICE
from tests.kernels.cuda.multiplying import CARD, product, random


def matrix_of(n: int, k: int) -> tuple[Int4Matrix, Tensor]:
    """Return a matrix and its values."""
    codes = torch.randint(-8, 8, (n, k), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    scales = (0.5 + torch.rand(n, k // 128, generator=torch.Generator().manual_seed(1)).to(DEVICE)) / 100
    return Int4Matrix(pack_int4(codes), scales), codes.double() * scales.repeat_interleave(128, 1)


@pytest.mark.parametrize(("n", "k"), [(64, 128), (128, 640)] + CARD * [(4096, 1024), (4096, 12288)])
@pytest.mark.parametrize("rows", [1, 21, 70, 130])
def test_products_are_right(n: int, k: int, rows: int) -> None:
    (matrix, values), x = matrix_of(n, k), random(rows, k, seed=1)
    error = (product(matrix, x).double() - x.double() @ values.T).abs()
    assert (error <= 2e-6 * x.double().abs() @ values.abs().T).all()


@pytest.mark.parametrize(("n", "k"), [(64, 640)] + CARD * [(1024, 3072), (4096, 4096)])
def test_bits_do_not_depend_on_the_number_of_rows(n: int, k: int) -> None:
    matrix, x = matrix_of(n, k)[0], random(200, k, seed=1)
    want = product(matrix, x)
    for first, end in [(0, 1), (2, 19), (3, 40), (10, 110)]:
        assert torch.equal(product(matrix, x[first:end].contiguous()), want[first:end])


def test_weights_that_fill_no_tile_are_refused() -> None:
    with pytest.raises(ValueError, match="96 outputs and 128 inputs"):
        pack_int4(torch.zeros(96, 128, dtype=torch.int32))
