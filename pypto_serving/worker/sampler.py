"""RowSamplers: prepare random numbers and logit adjustments of a step's rows, and sample with a Sampler."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pypto_serving.backend.base import LogitAdjustments, SamplingInputs
from pypto_serving.backend.philox import uniforms
from pypto_serving.types.arrays import Float32Array, Int32Array
from pypto_serving.types.draws import DRAW, Sampler
from pypto_serving.types.sampling import RowSampling
from pypto_serving.worker import logit_adjust
from pypto_serving.worker.logit_adjust import Adjustment

AHEAD = 16
"""Positions to make random numbers for at once: the cost hardly depends on how many they are."""


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """Log-probabilities from the raw logits: the sampled token's value and rank (1 is best), and the top tokens."""

    logprob: float
    rank: int
    top_ids: Int32Array
    top_logprobs: Float32Array


class RowSamplers:
    """Owns the sampling parameters of R rows, as arrays indexed by row. They are set once, with the row.

    Random numbers, adjusted logits and log-probabilities cost nothing while no row needs them.
    """

    def __init__(self, rows: int, max_drafts: int = 0) -> None:
        self._ahead = max(AHEAD, 1 + max_drafts)
        self._draws = np.zeros(rows, DRAW)
        self._seeds = np.zeros(rows, np.uint64)
        self._choices = np.zeros(rows, np.uint64)
        self._uniforms = np.zeros((rows, self._ahead))
        self._uniforms_from = np.zeros(rows, np.int32)
        self._num_logprobs = np.full(rows, -1, np.int32)
        self._adjustments: dict[int, Adjustment] = {}
        self._masks: dict[int, NDArray[np.uint32]] = {}
        self._random: set[int] = set()
        self._asking: set[int] = set()

    def set(self, row: int, sampling: RowSampling, prompt_len: int) -> None:
        """Set the sampling parameters of `row`. Its prompt has `prompt_len` tokens."""
        self.clear(row)
        self._draws[row] = (0.0, sampling.top_p, sampling.min_p, sampling.temperature, sampling.top_k)
        self._seeds[row], self._choices[row] = sampling.seed, sampling.choice
        self._uniforms_from[row] = -self._ahead
        self._num_logprobs[row] = sampling.num_logprobs
        adjustment = Adjustment.of(sampling, prompt_len)
        if adjustment is not None:
            self._adjustments[row] = adjustment
        if sampling.temperature > 0:
            self._random.add(row)
        if sampling.num_logprobs >= 0:
            self._asking.add(row)

    def clear(self, row: int) -> None:
        """Clear the sampling parameters of `row`."""
        self._adjustments.pop(row, None)
        self._masks.pop(row, None)
        self._random.discard(row)
        self._asking.discard(row)
        self._num_logprobs[row] = -1

    def sample(
        self, logits: Float32Array, rows: Int32Array, positions: Int32Array, sampler: Sampler
    ) -> tuple[Int32Array, dict[int, SampledLogprobs]]:
        """Sample tokens int32 [s] from logits [s, vocab], for `rows` [s] at absolute `positions` [s]. Rows may repeat.

        A token is -1 if its logits are not finite. Also return log-probabilities, by index, for rows that ask for them.
        """
        draws = self._draws[rows]
        if self._random:
            draws["random"] = self._random_numbers(rows, positions)
        tokens = sampler.choose(logits, draws)
        if self._adjustments:
            self._choose_again(tokens, logits, rows, positions, draws, sampler)
        return tokens, self._logprobs(tokens, logits, rows, sampler) if self._asking else {}

    def num_logprobs(self, rows: Int32Array) -> Int32Array:
        """Return how many top log-probabilities each of `rows` asks for; -1 for none, not even its token's."""
        found: Int32Array = self._num_logprobs[rows]
        return found

    def inputs(self, rows: Int32Array, owners: Int32Array, positions: Int32Array, vocab_size: int) -> SamplingInputs:
        """Build a device's inputs for `rows` [n], at indices `owners` of a dispatch, sampling from `positions` on."""
        draws = self._draws[rows]
        if self._random:
            draws["random"] = self._random_numbers(rows, positions)
        return SamplingInputs(
            owners=owners,
            draws=draws,
            seeds=self._seeds[rows],
            choices=self._choices[rows],
            positions=positions,
            num_logprobs=self._num_logprobs[rows],
            adjustments=self._packed_adjustments(rows.tolist(), vocab_size) if self._adjustments else None,
        )

    def _packed_adjustments(self, rows: list[int], vocab_size: int) -> LogitAdjustments:
        found = [self._adjustments.get(row) for row in rows]
        for row, each in zip(rows, found, strict=True):
            if each is not None and each.allowed_ids.size and row not in self._masks:
                self._masks[row] = each.mask(vocab_size)
        return logit_adjust.pack(found, [self._masks.get(row) for row in rows])

    def _random_numbers(self, rows: Int32Array, positions: Int32Array) -> NDArray[np.float64]:
        """Return the numbers of `rows` at `positions`; a row may repeat, with its next positions.

        If one row has none left, make the next for all.
        """
        ahead, index = self._ahead, positions - self._uniforms_from[rows]
        if index.min(initial=0) < 0 or index.max(initial=0) >= ahead:
            unique, first = np.unique(rows, return_index=True)
            nexts = (positions[first][:, None] + np.arange(ahead)).ravel().astype(np.uint64)
            seeds, choices = self._seeds[unique].repeat(ahead), self._choices[unique].repeat(ahead)
            self._uniforms[unique] = uniforms(seeds, choices, nexts).reshape(-1, ahead)
            self._uniforms_from[unique] = positions[first]
            index = positions - self._uniforms_from[rows]
        found: NDArray[np.float64] = self._uniforms[rows, index]
        return found

    def _choose_again(
        self,
        tokens: Int32Array,
        logits: Float32Array,
        rows: Int32Array,
        positions: Int32Array,
        draws: NDArray[np.void],
        sampler: Sampler,
    ) -> None:
        """Sample again from adjusted logits, for rows that have an adjustment at their position."""
        changed = [
            (i, adjustment.apply(logits[i], position))
            for i, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True))
            if tokens[i] >= 0 and (adjustment := self._adjustments.get(row)) is not None and adjustment.is_due(position)
        ]
        if changed:
            index = [i for i, _ in changed]
            tokens[index] = sampler.choose(np.stack([each for _, each in changed]), draws[index])

    def _logprobs(
        self, tokens: Int32Array, logits: Float32Array, rows: Int32Array, sampler: Sampler
    ) -> dict[int, SampledLogprobs]:
        """Return log-probabilities from the raw logits, by index, for rows that ask for them."""
        pairs = enumerate(zip(rows.tolist(), tokens.tolist(), strict=True))
        asking = np.array([i for i, (row, token) in pairs if row in self._asking and token >= 0], np.int32)
        if not asking.size:
            return {}
        counts = self._num_logprobs[rows[asking]]
        found = sampler.logprobs(logits, asking, tokens[asking], int(counts.max()))
        return {
            i: SampledLogprobs(
                float(found.values[j]), int(found.ranks[j]), found.best_ids[j, :count], found.best_values[j, :count]
            )
            for j, (i, count) in enumerate(zip(asking.tolist(), counts.tolist(), strict=True))
        }
