"""The sequence of golden tests on the kernels, its chunks, and the error that they allow."""

from __future__ import annotations

import numpy as np

from tests.model.sequences import Array

ROOM = 1.1
CHUNKS = [100, 37, 128, *[1] * 35]
LENGTH = sum(CHUNKS)
ENDS = np.cumsum(CHUNKS) - 1


def random_tokens(seed: int) -> Array:
    return np.random.default_rng(seed).integers(0, 256, LENGTH)
