"""The programs of the conformance suite in PyPTO's language, each from host to core."""

import pypto.language as pl

SIZE = 128


@pl.jit.incore
def double_tile(given: pl.Tensor, kept: pl.Out[pl.Tensor]):
    tile = pl.load(given, [0, 0], [SIZE, SIZE])
    return pl.store(pl.add(tile, tile), [0, 0], kept)


@pl.jit
def fill_chip(given: pl.Tensor, kept: pl.Out[pl.Tensor]):
    result = double_tile(given, kept)
    return result


@pl.jit.host
def fill(given: pl.Tensor, kept: pl.Out[pl.Tensor]):
    result = fill_chip(given, kept)
    return result


@pl.jit.incore
def add_tiles(given: pl.Tensor, kept: pl.Tensor, out: pl.Out[pl.Tensor]):
    left = pl.load(given, [0, 0], [SIZE, SIZE])
    right = pl.load(kept, [0, 0], [SIZE, SIZE])
    return pl.store(pl.add(left, right), [0, 0], out)


@pl.jit
def read_chip(given: pl.Tensor, kept: pl.Tensor, out: pl.Out[pl.Tensor]):
    result = add_tiles(given, kept, out)
    return result


@pl.jit.host
def read(given: pl.Tensor, kept: pl.Tensor, out: pl.Out[pl.Tensor]):
    result = read_chip(given, kept, out)
    return result
