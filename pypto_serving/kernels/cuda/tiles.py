"""Choose how products are cut: the splits of a sum, which are law, and tiles, which only change speed.

The tables hold what was fastest on an H200 for the matrices of Qwen3 0.6B, 8B and 14B.
"""

from __future__ import annotations

from typing import NamedTuple

from pypto_serving.kernels.cuda.launch import power_of_two
from pypto_serving.util import ceil_div

LENGTH_UNIT = 128  # the length of a split is a multiple of this, hence of the depth of every tile
_MAX_SPLITS = 8
_SPLIT_LENGTH = 256  # no shorter ones
_PROGRAMS = 128  # that many fill a card of 132 multiprocessors


class Tile(NamedTuple):
    """The part of a product that a program holds at a time, and how it is made."""

    rows: int  # of x
    columns: int  # of the output, rows of the weights
    depth: int  # values of k
    warps: int
    stages: int
    bulk: bool = True  # tiles are copied by descriptors, not by pointers: not before compute capability 9.0


def num_splits(n: int, k: int) -> int:
    """Return how many parts the sum over k has. The parts are rounded, so this decides the bits of a product."""
    splits = 1
    while splits < _MAX_SPLITS and k >= 2 * splits * _SPLIT_LENGTH and ceil_div(n, 64) * splits < _PROGRAMS:
        splits *= 2
    return ceil_div(k, split_length(k, splits))


def split_length(k: int, splits: int) -> int:
    """Return how many values of k a split has. The last one may have fewer."""
    return ceil_div(ceil_div(k, splits), LENGTH_UNIT) * LENGTH_UNIT


# Of the lines that hold, the last one counts: at most so many rows, at least so many columns, splits at least so long.
_FEW = (
    (16, 0, 0, Tile(16, 64, 64, 4, 6, bulk=False)),
    (16, 0, 512, Tile(16, 64, 128, 4, 4, bulk=False)),
    (16, 0, 2048, Tile(16, 64, 128, 4, 5)),
    (16, 5120, 512, Tile(16, 64, 128, 4, 4, bulk=False)),
    (16, 32768, 2048, Tile(16, 128, 128, 4, 4)),
    (32, 0, 0, Tile(32, 64, 128, 4, 4, bulk=False)),
    (64, 0, 0, Tile(64, 64, 128, 4, 4)),
    (64, 5120, 0, Tile(64, 64, 64, 4, 6)),
    (64, 32768, 2048, Tile(64, 128, 64, 4, 5)),
    (128, 0, 0, Tile(64, 64, 128, 4, 3)),
    (128, 0, 2048, Tile(128, 64, 128, 4, 3)),
    (128, 5120, 0, Tile(128, 64, 64, 4, 4)),
    (128, 32768, 0, Tile(128, 128, 64, 4, 4)),
    (128, 32768, 2048, Tile(128, 128, 128, 8, 3)),
    (256, 0, 0, Tile(128, 64, 64, 4, 4)),
    (256, 0, 2048, Tile(256, 64, 64, 8, 5)),
    (256, 5120, 0, Tile(128, 64, 64, 4, 3)),
)
_GATED = (
    # Not measured: tiles of 32 columns, so that 96 programs rather than 48 load the weights of 0.6B.
    (16, 0, 0, Tile(16, 32, 128, 4, 4, bulk=False)),
    (16, 0, 2048, Tile(16, 64, 128, 4, 3)),
    (32, 0, 0, Tile(32, 32, 128, 4, 4, bulk=False)),
    (32, 0, 2048, Tile(32, 64, 64, 4, 4, bulk=False)),
    (64, 0, 0, Tile(64, 64, 128, 4, 3)),
    (64, 0, 2048, Tile(64, 64, 64, 4, 4)),
    (128, 0, 0, Tile(64, 64, 128, 4, 3)),
    (128, 0, 2048, Tile(128, 128, 64, 8, 4)),
    (256, 0, 0, Tile(64, 128, 64, 4, 5)),
)
# Cards without bulk copies were not measured.
_FEW_BY_POINTERS = (
    (16, 0, 0, Tile(16, 64, 128, 4, 4, bulk=False)),
    (32, 0, 0, Tile(32, 64, 128, 4, 4, bulk=False)),
    (64, 0, 0, Tile(64, 64, 64, 4, 4, bulk=False)),
    (128, 0, 0, Tile(128, 128, 32, 8, 4, bulk=False)),
)
_GATED_BY_POINTERS = (
    (16, 0, 0, Tile(16, 64, 64, 4, 5, bulk=False)),
    (32, 0, 0, Tile(32, 64, 64, 4, 4, bulk=False)),
    (64, 0, 0, Tile(64, 64, 64, 4, 3, bulk=False)),
    (128, 0, 0, Tile(128, 64, 32, 8, 4, bulk=False)),
)
_MANY_ONE_SPLIT = Tile(128, 256, 64, 8, 3)
_MANY = Tile(128, 128, 64, 8, 4)
_MANY_ROUNDED = Tile(128, 128, 128, 8, 4)
_MANY_GATED = Tile(128, 128, 64, 8, 4)
_FEW_ROWS = 256
_WIDE, _FEW_ROWS_OF_WIDE = 32768, 128  # so many columns, as of an output layer
MAX_ROWS_APART = 1024  # no more rows have their splits written apart, if there are bulk copies
_MANY_PROGRAMS = 96


def few_rows(n: int, k: int, splits: int, rows: int, bulk: bool) -> Tile:
    """Return the tile of a product that writes its splits apart."""
    return _choose(_FEW if bulk else _FEW_BY_POINTERS, n, split_length(k, splits), rows)


def many_rows(n: int, splits: int, rows: int, bulk: bool) -> Tile | None:
    """Return the tile of a product that adds its splits itself. None: they are written apart, for so few programs."""
    few = _FEW_ROWS_OF_WIDE if splits == 1 and n >= _WIDE else _FEW_ROWS
    if not bulk or rows <= few:
        return None
    tile = _MANY_ONE_SPLIT if splits == 1 else _MANY
    programs = ceil_div(rows, tile.rows) * ceil_div(n, tile.columns)
    if splits > 1 and rows <= MAX_ROWS_APART and programs < _MANY_PROGRAMS:
        return None
    return tile


def gated_few_rows(n: int, k: int, rows: int, bulk: bool) -> Tile:
    """Return the tile of a gated product of n outputs whose weights are the rows of the instructions."""
    return _choose(_GATED if bulk else _GATED_BY_POINTERS, n, k, rows)


def gated_many_rows(rows: int, bulk: bool) -> Tile | None:
    """Return the tile of a gated product of many rows, or None."""
    return _MANY_GATED if bulk and rows > _FEW_ROWS else None


def int8_few_rows(length: int, rows: int) -> Tile:
    """Return the tile of an int8 product that writes its splits, so long, apart."""
    if rows <= 16:
        deep = length >= 1024 and length % 256 == 0
        return Tile(16, 64, 256, 4, 4, bulk=False) if deep else Tile(16, 64, 128, 4, 5, bulk=False)
    if rows <= 64:
        return Tile(power_of_two(rows), 64, 128, 4, 5, bulk=False)
    return Tile(128, 128, 128, 8, 3, bulk=False)


def fp8_few_rows(rows: int) -> Tile:
    """Return the tile of an FP8 product that writes its splits apart."""
    if rows <= 64:
        return Tile(max(16, power_of_two(rows)), 64, 128, 4, 5 if rows <= 16 else 4, bulk=False)
    return Tile(128, 128, 128, 8, 3, bulk=False)


def int4_rows(rows: int, bulk: bool) -> Tile:
    """Return the tile of a product of 4 bits. Its columns and depth are those of the packing."""
    if rows <= 16:
        return Tile(16, 64, 128, 4, 8, bulk=False)
    if rows <= 64 or not bulk:
        return Tile(min(64, power_of_two(rows)), 64, 128, 4, 4, bulk=False)
    return Tile(128, 64, 128, 4, 3, bulk=False)


def rounded_many_rows(rows: int, bulk: bool) -> Tile | None:
    """Return the tile of a product of 8 bits that adds its splits itself, or None."""
    return _MANY_ROUNDED if bulk and rows > _FEW_ROWS else None


def _choose(table: tuple[tuple[int, int, int, Tile], ...], n: int, length: int, rows: int) -> Tile:
    most = next((line[0] for line in table if rows <= line[0]), table[-1][0])
    return [tile for limit, columns, depth, tile in table if limit == most and n >= columns and length >= depth][-1]
