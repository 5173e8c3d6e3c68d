"""The host's sampler: chooses a token for each row from float32 logits, every row by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pypto_serving.types.sampling import RowSampling
from pypto_serving.types.tokens import unpack_ids
from pypto_serving.worker.philox import uniforms

Float32Array = NDArray[np.float32]
Int32Array = NDArray[np.int32]

HEAD = 1024
"""Candidates that top-p sorts before it falls back to the whole vocabulary."""


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """Of the raw logits: the chosen token's value and rank (1 is best), and the best tokens, best first."""

    logprob: float
    rank: int
    top_ids: Int32Array
    top_logprobs: Float32Array


def sample(
    logits: Float32Array, rows: Sequence[RowSampling], positions: Int32Array, num_output: Int32Array
) -> tuple[Int32Array, list[SampledLogprobs | None]]:
    """Tokens int32 [s] for logits [s, vocab], and log-probabilities where a row asks for them.

    Greedy where the temperature is 0, else temperature, min_p, top_k, top_p in this order. A row's token depends on
    its own logits and parameters only; ties go to the lowest id. `positions` [s] are the absolute positions of the
    new tokens, `num_output` [s] how many output tokens each row has. Raises RuntimeError for logits that are not
    finite.
    """
    best = logits.argmax(axis=1)
    top = logits[np.arange(len(best)), best]
    if not np.isfinite(top).all():
        raise RuntimeError(f"the logits of row {int(np.flatnonzero(~np.isfinite(top))[0])} of a step are not finite")
    tokens = best.astype(np.int32)
    randoms = _randoms(rows, positions)
    values: list[SampledLogprobs | None] = []
    for i, (row, raw) in enumerate(zip(rows, logits, strict=True)):
        scores = _without_banned(raw, row) if num_output[i] < row.min_tokens else raw
        if row.temperature > 0:
            tokens[i] = _draw(scores, row, randoms[i])
        elif scores is not raw:
            tokens[i] = scores.argmax()
        values.append(_logprobs(raw, int(tokens[i]), row.num_logprobs) if row.num_logprobs >= 0 else None)
    return tokens, values


def _randoms(rows: Sequence[RowSampling], positions: Int32Array) -> NDArray[np.float64]:
    if all(row.temperature == 0 for row in rows):
        return np.empty(0)
    seeds = np.array([row.seed for row in rows], dtype=np.uint64)
    choices = np.array([row.choice for row in rows], dtype=np.uint64)
    return uniforms(seeds, choices, positions.astype(np.uint64))


def _without_banned(logits: Float32Array, row: RowSampling) -> Float32Array:
    """`logits` with the banned ids out of reach; as they are where nothing else would be left."""
    banned = unpack_ids(row.banned_ids)
    scores = logits.copy()
    scores[banned[banned < len(logits)]] = -np.inf
    return scores if np.isfinite(scores.max()) else logits


def _draw(logits: Float32Array, row: RowSampling, random: float) -> int:
    """Inverse of the cumulative distribution: in order of id without filters, else best first."""
    scores = (logits - logits.max()) / np.float32(row.temperature)
    if row.min_p > 0:
        scores = np.where(scores >= math.log(row.min_p), scores, np.float32(-np.inf))
    if row.top_k == 0 and row.top_p == 1:
        return _invert(np.cumsum(np.exp(scores), dtype=np.float64), random)
    if row.top_k:
        ids = _best(scores, row.top_k)
        total = None
    else:
        ids = _best(scores, HEAD)
        total = float(np.exp(scores).sum(dtype=np.float64))
    cumulative = np.cumsum(np.exp(scores[ids]), dtype=np.float64)
    if total is not None and cumulative[-1] < row.top_p * total:
        ids = np.lexsort((np.arange(len(scores)), -scores))
        cumulative = np.cumsum(np.exp(scores[ids]), dtype=np.float64)
    if row.top_p < 1:
        wanted = row.top_p * (cumulative[-1] if total is None else total)
        cumulative = cumulative[: int(np.searchsorted(cumulative, wanted)) + 1]
    return int(ids[_invert(cumulative, random)])


def _invert(cumulative: NDArray[np.float64], random: float) -> int:
    """First index whose cumulative weight exceeds `random` of the total."""
    index = int(np.searchsorted(cumulative, random * cumulative[-1], side="right"))
    return min(index, int(np.searchsorted(cumulative, cumulative[-1])))


def _best(scores: Float32Array, count: int) -> NDArray[np.intp]:
    """Ids of the `count` best scores, best first, ties to the lowest id."""
    if count >= len(scores):
        candidates = np.arange(len(scores))
    else:
        candidates = np.flatnonzero(scores >= np.partition(scores, len(scores) - count)[len(scores) - count])
    return candidates[np.lexsort((candidates, -scores[candidates]))][:count]


def _logprobs(logits: Float32Array, token: int, count: int) -> SampledLogprobs:
    shifted = logits.astype(np.float64) - float(logits.max())
    logprobs = shifted - math.log(np.exp(shifted).sum())
    ids = _best(logits, count) if count else np.empty(0, dtype=np.intp)
    rank = int((logits > logits[token]).sum()) + 1
    return SampledLogprobs(
        float(np.float32(logprobs[token])), rank, ids.astype(np.int32), logprobs[ids].astype(np.float32)
    )
