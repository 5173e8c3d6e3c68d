"""Row kernels: against float64, and bit by bit alone against batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pypto_serving.kernels.cuda.rows import add_norm, embed, gather, split_heads
from pypto_serving.kernels.cuda.step import KVPages
from tests.kernels.cuda.contexts import error, int32, poisoned, random, step_tensors
from tests.kernels.cuda.devices import DEVICE

EPS = 1e-6
TOLERANCE = 4e-3


def test_embed_takes_ids_and_last_tokens() -> None:
    table = random(10, 48, seed=1)
    x = poisoned(5, 48, dtype=torch.float32)
    embed(int32([7, -1, 0, -3, -2]), int32([4, -1, 9]), table, x)
    assert torch.equal(x, table[[7, 4, 0, 9, 0]].float())


def test_gather_copies_rows() -> None:
    x = random(6, 80, seed=1)
    out = poisoned(3, 80)
    gather(x, int32([5, 0, 5]), out)
    assert torch.equal(out, x[[5, 0, 5]])


@pytest.mark.parametrize("hidden", [64, 200, 1024])
@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize("has_bias", [False, True])
def test_add_norm_is_that_of_float64(hidden: int, num_splits: int, has_bias: bool) -> None:
    x = random(5, hidden, seed=1, dtype=torch.float32)
    sums = random(num_splits, 5, hidden, seed=2, dtype=torch.float32)
    weight, bias = random(hidden, seed=3), random(hidden, seed=4) if has_bias else None
    expected = x.double() + sums.double().sum(0) + (0 if bias is None or not num_splits else bias.double())

    def apply(rows: slice) -> tuple[Tensor, Tensor]:
        own, out = x[rows].clone(), poisoned(*x[rows].shape)
        add_norm(own, sums[:, rows].contiguous(), num_splits, weight, EPS, out, bias)
        return own, out

    summed, normed = apply(slice(None))
    assert error(summed, expected) < 1e-6
    norm = (expected.square().mean(1, keepdim=True) + EPS).rsqrt()
    assert error(normed, expected * norm * weight.double()) < TOLERANCE
    for row in (0, 3):
        alone = apply(slice(row, row + 1))
        assert torch.equal(alone[0][0], summed[row]) and torch.equal(alone[1][0], normed[row])


HEADS, KV_HEADS, BLOCK_SIZE = 5, 2, 16
POSITIONS, SLOTS = (3, 9, 63, 0), (33, 40, 95, 0)


class SplitHeads:
    """A call of `split_heads` and its result in float64."""

    def __init__(self, head_dim: int, has_norms: bool, has_bias: bool) -> None:
        self.head_dim = head_dim
        self.width = (HEADS + 2 * KV_HEADS) * head_dim
        self.sums = random(2, 4, self.width, seed=1, dtype=torch.float32)
        self.norms = random(2, head_dim, seed=2) if has_norms else None
        self.bias = random(self.width, seed=3) if has_bias else None
        angles = torch.rand(64, head_dim // 2, generator=torch.Generator().manual_seed(4)).to(DEVICE) * 6
        self.cos, self.sin = angles.cos(), angles.sin()

    def __call__(self, sums: Tensor, tokens: list[int]) -> tuple[Tensor, Tensor]:
        shape = 6, 2, 2, KV_HEADS, BLOCK_SIZE, self.head_dim
        pages = KVPages(poisoned(*shape).flatten(), 6, 2, KV_HEADS, self.head_dim, BLOCK_SIZE)
        q = poisoned(len(tokens), HEADS, self.head_dim)
        step = step_tensors(
            positions=int32([POSITIONS[token] for token in tokens]), slots=int32([SLOTS[token] for token in tokens])
        )
        own = sums[:, tokens].contiguous()
        split_heads(own, len(sums), step, 1, pages, q, self.norms, self.bias, self.cos, self.sin, EPS)
        return q, pages.view()

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.sums.double().sum(0) + (0 if self.bias is None else self.bias.double())
        q, k, v = heads.view(4, -1, self.head_dim).split([HEADS, KV_HEADS, KV_HEADS], 1)
        if self.norms is not None:
            q, k = (
                x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
                for x, weight in zip((q, k), self.norms, strict=True)
            )
        return self.rotate(q), self.rotate(k), v

    def rotate(self, x: Tensor) -> Tensor:
        cos, sin = (table[list(POSITIONS)].double()[:, None] for table in (self.cos, self.sin))
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


@pytest.mark.parametrize("head_dim", [16, 128])
@pytest.mark.parametrize(("has_norms", "has_bias"), [(True, False), (False, True), (False, False), (True, True)])
def test_split_heads_is_that_of_float64(head_dim: int, has_norms: bool, has_bias: bool) -> None:
    call = SplitHeads(head_dim, has_norms, has_bias)
    q, pages = call(call.sums, [0, 1, 2, 3])
    expected_q, *expected_pages = call.expected()
    assert error(q, expected_q) < TOLERANCE
    for token, slot in enumerate(SLOTS):
        block, offset = divmod(slot, BLOCK_SIZE)
        for which, expected in enumerate(expected_pages):
            assert error(pages[block, 1, which, :, offset], expected[token]) < TOLERANCE
    assert int(torch.isfinite(pages).sum()) == 4 * 2 * KV_HEADS * head_dim  # nothing else is written


@pytest.mark.parametrize(("has_norms", "has_bias"), [(True, False), (False, True)])
def test_split_heads_have_the_bits_of_a_token_alone(has_norms: bool, has_bias: bool) -> None:
    call = SplitHeads(64, has_norms, has_bias)
    q, pages = call(call.sums, [0, 1, 2, 3])
    added = call.sums[0:1] + call.sums[1:2]
    for sums in call.sums, added:
        alone, own = call(sums, [2])
        assert torch.equal(alone[0], q[2])
        block, offset = divmod(SLOTS[2], BLOCK_SIZE)
        assert torch.equal(own[block, 1, :, :, offset], pages[block, 1, :, :, offset])
