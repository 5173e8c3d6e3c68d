"""Round weights to few bits in the calling thread."""

from __future__ import annotations

import numpy as np

from pypto_serving.kernels.library import library
from pypto_serving.types.arrays import BFloat16Array, Float32Array, UInt8Array

MOST_INPUTS = 128
"""Most inputs of a group."""


def round_int4(
    rows: Float32Array, size: int, levels: Float32Array, instruction_set: str = ""
) -> tuple[UInt8Array, BFloat16Array]:
    """Round rows [m, k] to codes [m, k / 2], two in a byte, and scales [m, k / size]; see convert/rounding.py."""
    lib, (m, k) = library(), rows.shape
    assert lib is not None and size <= MOST_INPUTS and size % 8 == 0 and k % size == 0
    codes, scales = np.empty((m, k // 2), np.uint8), np.empty((m, k // size), np.uint16)
    lib.round_int4(
        instruction_set,
        rows=np.ascontiguousarray(rows),
        groups=scales.size,
        size=size,
        levels=levels,
        num_levels=len(levels),
        codes=codes,
        scales=scales,
    )
    return codes, scales
