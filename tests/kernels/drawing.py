"""Samplers of the kernels, and what they draw with."""

from __future__ import annotations

import functools

import numpy as np

from pypto_serving.kernels import Engine, NativeSampler
from pypto_serving.types.sampler import DRAW

EDGES = (0.0, 1 - 2**-53, 0.5)


@functools.cache
def native(instruction_set: str = "", threads: int = 1) -> NativeSampler:
    return NativeSampler(Engine(instruction_set, threads))


def draws(rng: np.random.Generator, count: int, **values: float) -> np.ndarray:
    rows = np.zeros(count, dtype=DRAW)
    rows["temperature"], rows["top_p"], rows["random"] = 1, 1, rng.random(count)
    rows["random"][: len(EDGES)] = EDGES[:count]
    for name, value in values.items():
        rows[name] = value
    return rows
