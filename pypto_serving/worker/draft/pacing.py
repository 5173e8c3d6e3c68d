"""Pacing: how many of the proposed drafts pay."""

from __future__ import annotations

import numpy as np

from pypto_serving.types.arrays import Float32Array, Int32Array

KEPT = 0.95
"""Exponential decay of measured steps, at each new one."""
PRIOR_SLOPE = 0.1
"""What a token adds to the time of a step without tokens, as a share of it, before it is measured."""
PRIOR_SPREAD = 0.25
"""Variance of the numbers of tokens from which on what was measured counts more than the prior."""
LEAST_GAIN = 1.1
"""How much more than it costs a draft must be expected to bring, since both are estimates."""
MOST_LATE = 3.0
"""A step counts as at most this many times as long as expected."""


class StepCost:
    """Owns what steps of decodes, or passes of draft layers, cost: a + b * tokens seconds.

    Estimated from the last ones by weighted least squares.
    """

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0

    def measure(self, num_tokens: int, elapsed_s: float) -> None:
        """Record that a step or pass of `num_tokens`, drafts among them, took `elapsed_s`."""
        if self._weight:
            base_s, token_s = self.seconds()
            elapsed_s = min(elapsed_s, MOST_LATE * (base_s + token_s * num_tokens))
        self._weight = self._weight * KEPT + 1
        self._tokens = self._tokens * KEPT + num_tokens
        self._seconds = self._seconds * KEPT + elapsed_s
        self._squares = self._squares * KEPT + num_tokens**2
        self._products = self._products * KEPT + num_tokens * elapsed_s

    @property
    def is_measured(self) -> bool:
        """Return True once anything was measured."""
        return self._weight > 0

    def seconds(self) -> tuple[float, float]:
        """Return the seconds of a step, without tokens and for each token."""
        if not self._weight:
            return 1.0, PRIOR_SLOPE
        tokens, seconds = self._tokens / self._weight, self._seconds / self._weight
        prior = seconds * PRIOR_SLOPE / (1 + PRIOR_SLOPE * tokens)
        spread = self._squares / self._weight - tokens**2
        together = self._products / self._weight - tokens * seconds
        slope = (together + PRIOR_SPREAD * prior) / (spread + PRIOR_SPREAD)
        slope = min(max(slope, 0.0), seconds / max(tokens, 1.0))
        return seconds - slope * tokens, slope


def paying_drafts(counts: Int32Array, odds: Float32Array, num_tokens: int, steps: StepCost) -> Int32Array:
    """Return how many of the `counts` [n] drafts of each row pay, in a step of `num_tokens` other tokens.

    `odds` [n] are those of a draft to be right if all before it are. All n rows sample a token anyway.

    A draft adds to the time of its step, and with its odds a token to the output. The tokens per second are highest
    where drafts are taken as long as they add more tokens per second than the step has with those taken before, the
    likeliest first (Dinkelbach, On Nonlinear Fractional Programming, 1967). So few rows on a device that reads
    weights for all of them have many drafts, and many rows none but the sure ones.
    """
    ranks = np.arange(1, 1 + int(counts.max(initial=0)))
    chances = np.where(ranks <= counts[:, None], odds[:, None] ** ranks, 0.0).ravel()
    order = np.argsort(-chances, kind="stable")
    falling = chances[order]
    base_s, token_s = steps.seconds()
    seconds = base_s + token_s * (num_tokens + np.arange(len(falling)))
    expected = len(counts) + np.cumsum(falling) - falling
    fails = np.flatnonzero(falling * seconds <= LEAST_GAIN * token_s * expected)
    taken = order[: fails[0] if len(fails) else len(order)]
    found: Int32Array = np.bincount(taken // max(1, len(ranks)), minlength=len(counts)).astype(np.int32)
    return np.minimum(found, counts)


def paying_passes(most: Int32Array, odds: Float32Array, steps: StepCost, passes: StepCost) -> Int32Array:
    """Return how many drafts of each of n rows pay, at most `most` [n], where each costs a pass of draft layers.

    All rows that have a j-th draft share the j-th pass. `odds` [n] are those of a draft to be right if all before it
    are. Until a step and a pass were measured, all pay.
    """
    if not (steps.is_measured and passes.is_measured):
        return most
    (base_s, token_s), (pass_s, row_s) = steps.seconds(), passes.seconds()
    plain_s = base_s + token_s * len(most)
    ranks = np.arange(1, 1 + int(most.max(initial=0)))
    chances = np.where(ranks <= most[:, None], odds[:, None] ** ranks, 0.0)
    chances[chances * plain_s <= LEAST_GAIN * (token_s + row_s) * len(most)] = 0.0
    shares = (chances > 0).sum(axis=0)
    seconds = plain_s + np.cumsum(LEAST_GAIN * pass_s + (token_s + row_s) * shares)
    speeds = (len(most) + np.cumsum(chances.sum(axis=0))) / seconds
    best = int(speeds.argmax()) if len(speeds) else 0
    passed = best + 1 if len(speeds) and speeds[best] * plain_s > len(most) else 0
    counts: Int32Array = np.minimum((chances > 0).sum(axis=1), passed).astype(np.int32)
    return counts
