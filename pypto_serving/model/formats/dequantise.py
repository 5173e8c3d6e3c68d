"""Compute the float32 values of stored matrices, for conversions and tests. Torch-free."""

from __future__ import annotations

import sys

import numpy as np

from pypto_serving.model.formats.bits import AWQ_ORDER, E2M1, E4M3, as_float32
from pypto_serving.types.arrays import Array, Float32Array
from pypto_serving.types.weights import Layout, StoredCodes, StoredFp8, StoredQuantized, Table

_CENTRE = 8
"""What int4 codes without zero points are relative to."""
_INT4: Float32Array = np.arange(16, dtype=np.float32)
_TABLES = {Table.INT4: _INT4, Table.E2M1: E2M1}


def _pairs(table: Float32Array) -> Array:
    """Return the values of both halves of every byte, the lower half first, as one item of 64 bits."""
    codes = np.arange(256)
    assert sys.byteorder == "little"
    return np.stack([table[codes & 15], table[codes >> 4]], axis=1).reshape(-1).view(np.uint64)


_PAIRS = {table: _pairs(values) for table, values in _TABLES.items()}


def dequantised(stored: StoredQuantized, first: int = 0, last: int | None = None) -> Float32Array:
    """Return rows [first, last) of a matrix in float32, by default all."""
    rows = slice(first, last)
    return _fp8(stored, rows) if isinstance(stored, StoredFp8) else _codes(stored, rows)


def _fp8(stored: StoredFp8, rows: slice) -> Float32Array:
    weights = E4M3[stored.weights[rows]]
    height, width = stored.form.block
    blocks = np.arange(rows.start, rows.start + len(weights)) // height
    scales = stored.scales[blocks]
    if scales.shape[1] > 1:
        scales = np.repeat(scales, width, axis=1)[:, : weights.shape[1]]
    return np.multiply(weights, scales, out=weights)


def _codes(stored: StoredCodes, rows: slice) -> Float32Array:
    form = stored.form
    values = _values(stored, rows)
    n, k = values.shape
    scales = as_float32(stored.scales[rows], form.scale_dtype) * np.float32(stored.factor)
    groups = values.reshape(n, k // form.group, form.group)
    if stored.zeros is not None:
        groups -= stored.zeros[rows, :, None].astype(np.float32)
    elif form.table == Table.INT4 and stored.layout != Layout.BYTES:
        groups -= np.float32(_CENTRE)
    groups *= scales[:, :, None]
    return values


def _values(stored: StoredCodes, rows: slice) -> Float32Array:
    """Return the values of codes [n, k] before zero points and scales, in new memory."""
    pairs, codes = _PAIRS[stored.form.table], stored.codes
    match stored.layout:
        case Layout.ROWS:
            return pairs[codes[rows]].view(np.float32)
        case Layout.BYTES:
            return codes[rows].astype(np.float32)
        case Layout.GPTQ:
            words = np.ascontiguousarray(codes[:, rows].T)
            return pairs[words.view(np.uint8)].view(np.float32)
        case Layout.AWQ:
            words = np.ascontiguousarray(codes)
            values = pairs[words.view(np.uint8)].view(np.float32).reshape(len(codes), -1, len(AWQ_ORDER))
            by_output = values[:, :, np.argsort(AWQ_ORDER)].reshape(len(codes), -1)
            return np.ascontiguousarray(by_output[:, rows].T)
