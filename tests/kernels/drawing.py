"""Samplers of the kernels, and what they draw with."""

from __future__ import annotations

import functools
import math

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


def logits_of(kind: str, rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    normal = rng.standard_normal(shape).astype(np.float32)
    match kind:
        case "normal":
            return normal * 3
        case "steep":
            return normal * 30
        case "narrow":
            return normal * np.float32(1e-4) + 7
        case "ties":
            return normal.round(1)
        case "equal":
            return np.zeros(shape, np.float32)
        case _:
            return np.where((normal > 0.5) | (np.arange(shape[1]) == 0), normal, np.float32(-np.inf))


def interval(logits: np.ndarray, draw: np.void, token: int, top_p: float) -> tuple[float, float]:
    """The random numbers for which `token` is chosen, by the definition in float64; (1, 0) if for none."""
    scores = (logits - logits.max()) / draw["temperature"]
    if draw["min_p"] > 0:
        scores = np.where(scores >= np.float32(math.log(draw["min_p"])), scores, np.float32(-np.inf))
    ranked = draw["top_k"] > 0 or draw["top_p"] < 1
    order = np.argsort(-scores, kind="stable") if ranked else np.arange(len(scores))
    weights = np.exp(scores[order].astype(np.float64))
    if draw["top_k"] > 0:
        weights = weights[: draw["top_k"]]
    ends = np.cumsum(weights)
    if draw["top_p"] < 1:
        ends = ends[: int(np.searchsorted(ends, top_p * ends[-1])) + 1]
    place = int(np.flatnonzero(order == token)[0])
    if place >= len(ends) or weights[place] == 0:
        return 1.0, 0.0
    return (ends[place] - weights[place]) / ends[-1], ends[place] / ends[-1]


def follows(logits: np.ndarray, draw: np.void, token: int, within: float = 1e-5, top_p_within: float = 1e-12) -> bool:
    """True if the definition chooses `token` for a random number and a top_p this near."""
    nearby = (interval(logits, draw, token, draw["top_p"] * (1 + by)) for by in (0, -top_p_within, top_p_within))
    return any(low <= high and low - within <= draw["random"] <= high + within for low, high in nearby)
