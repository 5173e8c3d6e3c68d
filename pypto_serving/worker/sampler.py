"""Sampling of a step's rows: random numbers, banned ids, and a Sampler that does the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pypto_serving.types.draws import DRAW, Float32Array, Int32Array, Sampler
from pypto_serving.types.sampling import RowSampling
from pypto_serving.types.tokens import unpack_ids
from pypto_serving.worker.philox import uniforms
from pypto_serving.worker.plain import PlainSampler


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """Of the raw logits: the chosen token's value and rank (1 is best), and the best tokens, best first."""

    logprob: float
    rank: int
    top_ids: Int32Array
    top_logprobs: Float32Array


def sample(
    logits: Float32Array,
    rows: Sequence[RowSampling],
    positions: Int32Array,
    num_output: Int32Array,
    sampler: Sampler | None = None,
) -> tuple[Int32Array, list[SampledLogprobs | None]]:
    """Tokens int32 [s] for logits [s, vocab], and log-probabilities where a row asks for them.

    `positions` [s] are the absolute positions of the new tokens, `num_output` [s] how many output tokens each row
    has; without a `sampler`, numpy chooses. Raises RuntimeError for logits that are not finite.
    """
    sampler = sampler or PlainSampler()
    draws = _draws(rows, positions)
    tokens = sampler.choose(logits, draws)
    if (strange := np.flatnonzero(tokens < 0)).size:
        raise RuntimeError(f"the logits of row {strange[0]} of a step are not finite")
    banning = np.flatnonzero(num_output < np.array([row.min_tokens for row in rows]))
    if banning.size:
        allowed = np.stack([_without_banned(logits[i], rows[i]) for i in banning.tolist()])
        tokens[banning] = sampler.choose(allowed, draws[banning])
    return tokens, _logprobs(sampler, logits, rows, tokens)


def _draws(rows: Sequence[RowSampling], positions: Int32Array) -> NDArray[np.void]:
    draws = np.zeros(len(rows), dtype=DRAW)
    draws["temperature"] = [row.temperature for row in rows]
    if not draws["temperature"].any():
        return draws
    draws["top_k"] = [row.top_k for row in rows]
    draws["top_p"] = [row.top_p for row in rows]
    draws["min_p"] = [row.min_p for row in rows]
    seeds = np.array([row.seed for row in rows], dtype=np.uint64)
    choices = np.array([row.choice for row in rows], dtype=np.uint64)
    draws["random"] = uniforms(seeds, choices, positions.astype(np.uint64))
    return draws


def _without_banned(logits: Float32Array, row: RowSampling) -> Float32Array:
    """`logits` with the banned ids out of reach; as they are where nothing else would be left."""
    banned = unpack_ids(row.banned_ids)
    scores = logits.copy()
    scores[banned[banned < len(logits)]] = -np.inf
    return scores if np.isfinite(scores.max()) else logits


def _logprobs(
    sampler: Sampler, logits: Float32Array, rows: Sequence[RowSampling], tokens: Int32Array
) -> list[SampledLogprobs | None]:
    """Of the raw logits, for the rows that ask."""
    values: list[SampledLogprobs | None] = [None] * len(rows)
    counts = np.array([row.num_logprobs for row in rows])
    asking = np.flatnonzero(counts >= 0).astype(np.int32)
    if asking.size:
        found = sampler.logprobs(logits, asking, tokens[asking], int(counts.max()))
        for j, i in enumerate(asking.tolist()):
            best = slice(counts[i])
            values[i] = SampledLogprobs(
                float(found.values[j]), int(found.ranks[j]), found.best_ids[j, best], found.best_values[j, best]
            )
    return values
