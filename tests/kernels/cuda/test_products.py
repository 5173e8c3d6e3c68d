"""Products of rows and bf16 matrices: right, and with bits that depend on the row and the matrix alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pypto_serving.kernels.cuda import tiles
from pypto_serving.kernels.cuda.products import Bf16Matrix, GatedMatrix
from pypto_serving.kernels.cuda.tiles import Tile
from tests.kernels.cuda.devices import DEVICE
from tests.kernels.cuda.multiplying import CARD, product, random

ODD = (80, 560)  # fits no tile, and the second of its splits is shorter
SHAPES = [(16, 16), (64, 128), ODD] + CARD * [(4096, 1024), (1024, 2048), (6144, 4096), (4096, 12288)]
FEW = sorted({tile for *_, tile in tiles._FEW + tiles._FEW_BY_POINTERS})
GATED = sorted({tile for *_, tile in tiles._GATED + tiles._GATED_BY_POINTERS})
MANY = [tiles._MANY_ONE_SPLIT, tiles._MANY]


def gated_product(matrix: GatedMatrix, x: Tensor) -> Tensor:
    out = torch.full((len(x) + 1, matrix.n), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    matrix.multiply(x, out[:-1])
    assert torch.isfinite(out[:-1]).all() and torch.isnan(out[-1]).all()
    return out[:-1]


@pytest.mark.parametrize("rows", [1, 16, 21, 70, 300])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_right(shape: tuple[int, int], rows: int) -> None:
    weights, x = random(*shape), random(rows, shape[1], seed=1)
    error = (product(Bf16Matrix(weights), x).double() - x.double() @ weights.double().T).abs()
    assert (error <= 2e-6 * x.double().abs() @ weights.double().abs().T).all()


@pytest.mark.parametrize("rows", [1, 16, 21, 70, 300])
@pytest.mark.parametrize("shape", [(32, 16), (128, 128), (160, 176), (288, 336)] + CARD * [(6144, 1024), (24576, 4096)])
def test_gated_products_are_right(shape: tuple[int, int], rows: int) -> None:
    weights, x = random(*shape) / shape[1] ** 0.5, random(rows, shape[1], seed=1)
    gate, up = (x.double() @ weights.double().T).chunk(2, dim=1)
    want = torch.nn.functional.silu(gate) * up
    error = (gated_product(GatedMatrix(weights), x).double() - want).abs()
    assert (error <= want.abs() * 2**-8 + 1e-5).all()


@pytest.mark.parametrize("shape", [ODD] + CARD * [(1024, 3072), (4096, 4096)])
def test_bits_do_not_depend_on_the_number_of_rows(shape: tuple[int, int]) -> None:
    matrix, gated, x = Bf16Matrix(random(*shape)), GatedMatrix(random(*shape)), random(300, shape[1], seed=1)
    want, want_gated = product(matrix, x), gated_product(gated, x)
    for first, end in [(0, 1), (2, 5), (0, 17), (3, 60), (10, 110), (90, 290)]:
        assert torch.equal(product(matrix, x[first:end].contiguous()), want[first:end])
        assert torch.equal(gated_product(gated, x[first:end].contiguous()), want_gated[first:end])


@pytest.mark.parametrize("tile", FEW + MANY)
def test_bits_do_not_depend_on_tiles(tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, x = Bf16Matrix(random(*ODD)), random(21, ODD[1], seed=1)
    want = product(matrix, x)
    monkeypatch.setattr(tiles, "few_rows", lambda *_: tile)
    monkeypatch.setattr(tiles, "many_rows", lambda *_: tile if tile in MANY else None)
    assert torch.equal(product(matrix, x), want)


@pytest.mark.parametrize("tile", [*GATED, tiles._MANY_GATED])
def test_bits_of_gated_products_do_not_depend_on_tiles(tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, x = GatedMatrix(random(*ODD)), random(21, ODD[1], seed=1)
    want = gated_product(matrix, x)
    monkeypatch.setattr(tiles, "gated_few_rows", lambda *_: tile)
    monkeypatch.setattr(tiles, "gated_many_rows", lambda *_: tile if tile is tiles._MANY_GATED else None)
    assert torch.equal(gated_product(matrix, x), want)


@pytest.mark.parametrize(
    ("shape", "splits"),
    [
        ((4096, 1024), 2),
        ((1024, 2048), 8),
        ((1024, 3072), 8),
        ((6144, 4096), 2),
        ((4096, 4096), 2),
        ((4096, 12288), 2),
        ((151936, 1024), 1),
        ((64, 128), 1),
    ],
)
def test_splits_fill_the_card(shape: tuple[int, int], splits: int) -> None:
    assert tiles.num_splits(*shape) == splits


@pytest.mark.parametrize("k", range(16, 4096, 304))
def test_splits_cover_the_sum(k: int) -> None:
    splits = tiles.num_splits(16, k)
    length = tiles.split_length(k, splits)
    assert (splits - 1) * length < k <= splits * length
    assert all(length % tile.depth == 0 for tile in [*FEW, *GATED, *MANY])
