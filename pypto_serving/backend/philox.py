"""Philox4x32-10, a counter-based random generator (Salmon, Moraes, Dror, Shaw: Parallel random numbers, SC 2011).

A number is a pure function of (seed, choice, position, draw). It does not depend on step, batch or worker.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pypto_serving.types.arrays import UInt64Array

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
ROUNDS = 10
_WEYL = np.arange(ROUNDS, dtype=np.uint64)[:, None, None] * np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)


def philox4x32(counters: UInt64Array, keys: UInt64Array) -> UInt64Array:
    """Return random words [4, n] for counters [4, n] and keys [2, n]; all are 32-bit numbers in uint64."""
    even, odd = counters[::2], counters[1::2]
    for round_keys in keys + _WEYL & _LOW:
        products = even * _MULTIPLIERS
        even = (products >> _HALF)[::-1] ^ odd ^ round_keys
        odd = (products & _LOW)[::-1]
    return np.stack([even[0], odd[0], even[1], odd[1]])


def uniforms(seeds: UInt64Array, choices: UInt64Array, positions: UInt64Array, draw: int = 0) -> NDArray[np.float64]:
    """Return float64 [n] in [0, 1) with 53 random bits, for n seeds, choices and absolute positions."""
    counters = np.empty((4, len(positions)), np.uint64)
    counters[0], counters[1], counters[2], counters[3] = positions & _LOW, draw, choices & _LOW, positions >> _HALF
    keys = np.empty((2, len(positions)), np.uint64)
    keys[0], keys[1] = seeds & _LOW, seeds >> _HALF
    words = philox4x32(counters, keys)
    bits = ((words[0] >> np.uint64(5)) << np.uint64(26)) | (words[1] >> np.uint64(6))
    found: NDArray[np.float64] = bits.astype(np.float64) / float(1 << 53)
    return found
