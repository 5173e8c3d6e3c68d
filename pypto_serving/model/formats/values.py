"""Decode stored numbers: small floats, packed codes, scales, and whole matrices in float32. Torch-free."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from pypto_serving.errors import ModelError
from pypto_serving.kernels.packing import are_finite
from pypto_serving.model.checkpoint import FLOATS, StoredTensors
from pypto_serving.types.arrays import Array, Float32Array, UInt8Array
from pypto_serving.types.weights import Layout, StoredCodes, StoredFp8, StoredQuantized, Table
from pypto_serving.util import one_of

E2M1: Float32Array = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The values of 4-bit floats by code; bit 3 is the sign."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Outputs of the 8 codes in a word of AWQ, the lowest bits first."""
_E4M3_NAN = 0x7F
_WORD_CODES = 8


def _e4m3_table() -> Float32Array:
    """Compute all values of float8_e4m3fn: bias 7, subnormals m * 2^-9, no infinities."""
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    values = np.where(bits & 128, -magnitude, magnitude)
    values[[_E4M3_NAN, 128 | _E4M3_NAN]] = np.nan
    return values.astype(np.float32)


E4M3 = _e4m3_table()
E8M0: Float32Array = np.append(np.ldexp(np.float32(1), np.arange(-127, 128)), np.nan).astype(np.float32)
"""The values of e8m0 scales, powers of two, by code."""


def as_float32(values: NDArray[Any], dtype: str) -> Float32Array:
    """Convert stored numbers of `dtype` to float32, exactly."""
    match dtype:
        case "BF16":
            return (values.astype("<u4") << 16).view(np.float32)
        case "F8_E8M0" | "U8":
            return E8M0[values]
        case "F8_E4M3":
            return E4M3[values]
    return values.astype(np.float32)


def nibbles(words: NDArray[np.int32] | NDArray[np.uint32]) -> UInt8Array:
    """Unpack words [..., m] to 8 codes each, lowest bits first: [..., 8 m]."""
    packed = np.ascontiguousarray(words).view(np.uint8)
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*words.shape[:-1], _WORD_CODES * words.shape[-1])


E8M0_DTYPES = ("U8", "F8_E8M0")


class MatrixTensors:
    """Views the tensors of `module` by last component, and refuses scales that are not finite."""

    def __init__(self, tensors: StoredTensors, module: str) -> None:
        self._tensors, self._module = tensors, module

    def has(self, name: str) -> bool:
        """Return True if the module has a tensor called `name`."""
        return self._tensors.has(f"{self._module}.{name}")

    def is_surplus(self, name: str) -> bool:
        """Return True if the module has a tensor called `name` that the model does not need."""
        return self._tensors.is_surplus(f"{self._module}.{name}")

    def dtype(self, name: str) -> str:
        """Return the stored dtype."""
        return self._tensors[f"{self._module}.{name}"].dtype

    def view(self, name: str) -> Array:
        """View a tensor in its map; bfloat16 and 8-bit floats as unsigned integers."""
        return self._tensors.view(self._tensors[f"{self._module}.{name}"])

    def scales(self, name: str) -> Array:
        """View a tensor of scales as stored."""
        stored, dtype = self.view(name), self.dtype(name)
        if not are_finite(stored, dtype):
            self.refuse(name, "has scales that are not finite")
        return stored

    def float32(self, name: str) -> Float32Array:
        """Read a tensor of scales in float32."""
        return as_float32(self.scales(name), self.dtype(name))

    def require_order(self, name: str, k: int, group: int, unset: int | None = None) -> None:
        """Raise ModelError if the tensor `name` [k] exists and the inputs of a group are not adjacent in it.

        Ignore a tensor whose entries are all `unset`.
        """
        if not self.has(name):
            return
        self._require(name, (k,), ("I32", "I64"))
        groups = self.view(name)
        if unset is not None and (groups == unset).all():
            return
        odd = np.flatnonzero(groups != np.arange(k) // group)
        if len(odd):
            at = int(odd[0])
            self.refuse(
                name, f"puts input {at} into group {groups[at]}, not {at // group}: act-order (desc_act) is not served"
            )

    def require_zeros(self, name: str, n: int) -> None:
        """Raise ModelError if the tensor `name` [n] is surplus and has nonzero numbers."""
        if self.is_surplus(name):
            self._require(name, (n,), FLOATS)
            if self.float32(name).any():
                self.refuse(name, "is not zero, but config.json gives the model none")

    def _require(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
        """Raise ModelError unless an optional tensor has `shape` and one of `dtypes`."""
        found = self._tensors[f"{self._module}.{name}"]
        if found.shape != shape or found.dtype not in dtypes:
            wanted = f"shape {list(shape)} and dtype {one_of(dtypes)}"
            self.refuse(name, f"has shape {list(found.shape)} and dtype {found.dtype}, but must have {wanted}")

    def refuse(self, name: str, what: str) -> NoReturn:
        """Raise ModelError about a tensor."""
        raise ModelError(f"{self._tensors[f'{self._module}.{name}'].file}: tensor {self._module}.{name} {what}")


_CENTRE = 8
"""Zero point of int4 codes without stored zero points."""
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
