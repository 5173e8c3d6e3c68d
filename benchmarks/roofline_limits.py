"""Measure the roofline of the machine with the instructions that the kernels use."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pypto_serving.kernels.engine import Engine, zeros

READ_BYTES = 1 << 30

_COMPUTE_S = 0.01


class BandwidthMemory:
    """Owns `size` bytes for bandwidth measurements: far more than any cache holds."""

    def __init__(self, size: int = READ_BYTES) -> None:
        self.words: NDArray[np.uint32] = zeros(np.uint32, size // 4)
        self.words[:] = 1

    def bandwidth(self, engine: Engine, repeat: int = 10) -> float:
        """Measure bytes per second: the best of `repeat` reads of the whole memory by all threads of `engine`."""
        words = self.words
        read = engine._lib.measure_read
        best = min(read(engine._handle, words, words.size) for _ in range(repeat))
        return float(words.nbytes / best)


def peak(engine: Engine, repeat: int = 10, int8: bool = False) -> float:
    """Measure bfloat16 or int8 operations per second (multiplications and additions): the best of `repeat` loops.

    All threads run the dot product instruction of the GEMM, on registers only.
    """
    rounds, compute = 1 << 10, engine._lib.measure_compute
    while compute(engine._handle, int8, rounds) < _COMPUTE_S:
        rounds *= 2
    best = min(compute(engine._handle, int8, rounds) for _ in range(repeat))
    return float(rounds * engine._lib.round_flops(engine._handle, int8) * engine.threads / best)
