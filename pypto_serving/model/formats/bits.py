"""What the bits of small floats, packed codes and scales stand for, in numpy. Torch-free."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pypto_serving.types.arrays import Float32Array, UInt8Array

E2M1: Float32Array = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The values of 4-bit floats by code; bit 3 is the sign."""
E8M0_NAN = 0xFF
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Outputs of the 8 codes in a word of AWQ, the lowest bits first."""
_E4M3_NAN = 0x7F
_BF16_EXPONENT = 0x7F80
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
"""The powers of two that e8m0 scales stand for, by code."""


def are_finite(values: NDArray[Any], dtype: str) -> bool:
    """Return True if all stored numbers of `dtype` are finite, from their bits."""
    match dtype:
        case "BF16":
            return bool(((values & _BF16_EXPONENT) != _BF16_EXPONENT).all())
        case "F8_E8M0" | "U8":
            return bool((values != E8M0_NAN).all())
        case "F8_E4M3":
            return bool(((values & _E4M3_NAN) != _E4M3_NAN).all())
    return bool(np.isfinite(values).all())


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
    """Take words [..., m] apart into their 8 codes each, the lowest bits first: [..., 8 m]."""
    packed = np.ascontiguousarray(words).view(np.uint8)
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*words.shape[:-1], _WORD_CODES * words.shape[-1])
