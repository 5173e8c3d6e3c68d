"""What tests of products share."""

from __future__ import annotations

import torch
from torch import Tensor

from pypto_serving.kernels.cuda.products import SplitMatrix
from tests.kernels.cuda.devices import DEVICE

CARD = DEVICE.type == "cuda"


def random(*shape: int, seed: int = 0) -> Tensor:
    """Return the same random bf16 values each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


def product(matrix: SplitMatrix, x: Tensor) -> Tensor:
    """Multiply, add the splits in order, and check that all of them were written and nothing else."""
    sums = torch.full((matrix.num_sums(len(x)) + 64,), float("nan"), device=DEVICE)
    splits = matrix.multiply(x, sums)
    size = splits * len(x) * matrix.n
    assert size <= matrix.num_sums(len(x))
    assert torch.isfinite(sums[:size]).all() and torch.isnan(sums[size:]).all()
    first, *rest = sums[:size].view(splits, len(x), matrix.n)
    return sum(rest, first)
