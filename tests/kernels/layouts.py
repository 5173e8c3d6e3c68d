"""The memory layouts of csrc/ops.h, to and from row-major arrays of numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

from pypto_serving.kernels import Engine

Array = np.ndarray[Any, Any]

NAN = 0x7FC0
"""Not a number in bfloat16."""


def narrow(x: Array) -> Array:
    """float32 to the bits of bfloat16: to the nearest, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def widen(bits: Array) -> Array:
    """Bits of bfloat16 to float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(x: Array) -> Array:
    """float32 values that bfloat16 holds exactly."""
    return widen(narrow(x))


def random_bf16(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> Array:
    """Normal float32 values that bfloat16 holds exactly."""
    return rounded(rng.standard_normal(shape, np.float32) * np.float32(scale))


def strip_bounds(rows: int, engine: Engine) -> list[tuple[int, int]]:
    """First and last row, exclusive, of each strip."""
    count = -(-rows // engine.strip_rows)
    return [(rows * b // count, rows * (b + 1) // count) for b in range(count)]


def to_strips(x: Array, engine: Engine) -> Array:
    """[rows, k] as strips of pairs: of each strip, [k / 2][its rows]."""
    pairs = narrow(x).view(np.uint32)
    parts = [pairs[begin:end].T.ravel() for begin, end in strip_bounds(len(x), engine)]
    return np.concatenate([np.zeros(0, np.uint32), *parts])


def from_strips(strips: Array, rows: int, k: int, engine: Engine) -> Array:
    """Strips of pairs as [rows, k], float32."""
    x = np.zeros((rows, k // 2), np.uint32)
    for begin, end in strip_bounds(rows, engine):
        x[begin:end] = strips[begin * k // 2 : end * k // 2].reshape(k // 2, end - begin).T
    return widen(x.view(np.uint16))


def to_panels(weights: Array) -> Array:
    """Weights [n, k] as packed pairs: of each 32 outputs, [k / 2][32], with zeros behind n."""
    n, k = weights.shape
    padded = np.zeros((-(-n // 32) * 32, k), np.float32)
    padded[:n] = weights
    return narrow(padded).view(np.uint32).reshape(-1, 32, k // 2).transpose(0, 2, 1).ravel()


def interleaved(gate: Array, up: Array) -> Array:
    """Rows of two matrices [n, k] in turns of 16, as a gated product wants them."""
    n, k = gate.shape
    return np.stack([gate.reshape(n // 16, 16, k), up.reshape(n // 16, 16, k)], axis=1).reshape(2 * n, k)


def keys_of(pages: Array, dim: int) -> Array:
    """Pages of keys [..., size * dim] as [..., size, dim], still uint16."""
    *outer, elements = pages.shape
    size = elements // dim
    panels = pages.reshape(*outer, size // 32, dim // 2, 32, 2)
    return np.swapaxes(panels, -3, -2).reshape(*outer, size, dim)


def pages_of_keys(keys: Array) -> Array:
    """[..., size, dim] as pages of keys."""
    *outer, size, dim = keys.shape
    panels = keys.reshape(*outer, size // 32, 32, dim // 2, 2)
    return np.swapaxes(panels, -3, -2).reshape(*outer, size * dim)


def values_of(pages: Array, dim: int) -> Array:
    """Pages of values [..., size * dim] as [..., size, dim], still uint16."""
    *outer, elements = pages.shape
    size = elements // dim
    panels = pages.reshape(*outer, size // 32, dim // 32, 16, 32, 2)
    return np.moveaxis(panels.swapaxes(-2, -1), -4, -2).reshape(*outer, size, dim)


def pages_of_values(values: Array) -> Array:
    """[..., size, dim] as pages of values."""
    *outer, size, dim = values.shape
    panels = values.reshape(*outer, size // 32, 16, 2, dim // 32, 32)
    return np.moveaxis(panels, -2, -4).swapaxes(-2, -1).reshape(*outer, size * dim)


def quantized(x: Array) -> tuple[Array, Array]:
    """Rows [rows, k] as int8 and the scale of each: the largest magnitude becomes 127, ties go to the even number."""
    top = np.abs(x).max(1).astype(np.float32)
    with np.errstate(divide="ignore", over="ignore"):
        factor = np.where(top <= np.float32(1e-30), np.float32(0), np.float32(127) / top)
    return np.rint(x * factor[:, None]).astype(np.int8), top / np.float32(127)


def bytes_from_strips(strips: Array, rows: int, k: int, engine: Engine) -> Array:
    """Strips of quads, of each [k / 4][its rows], as int8 [rows, k]."""
    quads = np.zeros((rows, k // 4), np.uint32)
    for begin, end in strip_bounds(rows, engine):
        quads[begin:end] = strips[begin * k // 4 : end * k // 4].reshape(k // 4, end - begin).T
    return (quads.view(np.uint8) ^ 128).view(np.int8)


def to_byte_panels(weights: Array) -> Array:
    """Weights int8 [n, k] as packed quads: of each 32 outputs, [k / 4][32], with zeros behind n."""
    n, k = weights.shape
    padded = np.zeros((-(-n // 32) * 32, k), np.int8)
    padded[:n] = weights
    return padded.view(np.uint32).reshape(-1, 32, k // 4).transpose(0, 2, 1).ravel()
