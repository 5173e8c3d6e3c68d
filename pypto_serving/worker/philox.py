"""Philox4x32-10, a counter-based random generator (Salmon, Moraes, Dror, Shaw: Parallel random numbers, SC 2011).

A number is a pure function of (seed, choice, position, draw): it does not matter which step, batch or worker asks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

UInt64Array = NDArray[np.uint64]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
ROUNDS = 10


def philox4x32(counters: UInt64Array, keys: UInt64Array) -> UInt64Array:
    """Random words [n, 4] for counters [n, 4] and keys [n, 2], all 32-bit numbers held in uint64."""
    c0, c1, c2, c3 = counters.T
    k0, k1 = keys.T
    for _ in range(ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (second >> _HALF) ^ c1 ^ k0, second & _LOW, (first >> _HALF) ^ c3 ^ k1, first & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack([c0, c1, c2, c3], axis=1)


def uniforms(seeds: UInt64Array, choices: UInt64Array, positions: UInt64Array, draw: int = 0) -> NDArray[np.float64]:
    """Numbers in [0, 1) with 53 random bits, one for each seed, choice and absolute position."""
    counters = np.stack([positions & _LOW, np.full_like(positions, draw), choices & _LOW, positions >> _HALF], axis=1)
    words = philox4x32(counters, np.stack([seeds & _LOW, seeds >> _HALF], axis=1))
    bits = ((words[:, 0] >> np.uint64(5)) << np.uint64(26)) | (words[:, 1] >> np.uint64(6))
    return bits.astype(np.float64) / float(1 << 53)
