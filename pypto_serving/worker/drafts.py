"""Drafts of rows: RowDrafts has a Drafter write them, as many as pay; ModelDrafter asks the model's draft layers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pypto_serving.backend.base import Draft, Drafter, StepInputs
from pypto_serving.types.arrays import Float32Array, Int32Array
from pypto_serving.types.config import MAX_DRAFTS
from pypto_serving.types.sampler import Sampler

STEP_KEPT = 0.95
"""Exponential decay of measured steps, at each new one."""
PRIOR_SLOPE = 0.1
"""What a token adds to the time of a step without tokens, as a share of it, before it is measured."""
PRIOR_SPREAD = 0.25
"""If the numbers of tokens vary more than this (variance), measurements count more than the prior."""
LEAST_GAIN = 1.1
"""The expected gain of a draft must be this many times its cost, since both are estimates."""
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
        self._weight = self._weight * STEP_KEPT + 1
        self._tokens = self._tokens * STEP_KEPT + num_tokens
        self._seconds = self._seconds * STEP_KEPT + elapsed_s
        self._squares = self._squares * STEP_KEPT + num_tokens**2
        self._products = self._products * STEP_KEPT + num_tokens * elapsed_s

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

    A draft adds to the time of its step, and with its odds a token to the output. To maximize tokens per second, take
    the likeliest draft as long as it adds more tokens per second than the step has with the drafts taken before
    (Dinkelbach, On Nonlinear Fractional Programming, 1967). So on a device whose step mostly reads weights, few rows
    get many drafts, and many rows only those that are almost certain.
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


LayOut = Callable[[Int32Array, Int32Array], StepInputs]
"""Lays out the token of each of `rows` [n] at `positions` [n], after all computed ones."""
Draws = Callable[[Int32Array, Int32Array], NDArray[np.void]]
"""Returns how `rows` [n] choose the tokens at `positions` [n]: the DRAWs of the step that verifies them."""

PROBE_EVERY = 32
"""Rounds after which one draft is made although drafts do not pay, to notice when they do."""
KEPT = 0.9
"""Exponential decay of a row's record at each new judgement."""
PRIOR = 2.0
"""Weight, in drafts, of the record of all rows in the odds of one row."""


class Odds:
    """Owns the probability that a draft is right if all before it are, by row, with exponential decay.

    A row begins with the odds of all rows.
    """

    def __init__(self, max_rows: int) -> None:
        self._right: Float32Array = np.zeros(max_rows, np.float32)
        self._tried: Float32Array = np.zeros(max_rows, np.float32)
        self._all_right = self._all_tried = 1.0

    def start_row(self, row: int) -> None:
        """Forget the record of `row`."""
        self._right[row] = self._tried[row] = 0.0

    def estimate(self, rows: Int32Array) -> Float32Array:
        """Return the odds of `rows` [n]."""
        common = self._all_right / self._all_tried
        odds: Float32Array = (self._right[rows] + PRIOR * common) / (self._tried[rows] + PRIOR)
        return odds

    def rate(self, rows: Int32Array, right: Int32Array, tried: Int32Array) -> None:
        """Record that of `tried` [n] drafts of `rows` [n] `right` were right; those after a wrong one do not count."""
        self._right[rows] = self._right[rows] * KEPT + right
        self._tried[rows] = self._tried[rows] * KEPT + tried
        kept = KEPT ** (1 / max(1, len(rows)))
        for each_right, each_tried in zip(right.tolist(), tried.tolist(), strict=True):
            self._all_right, self._all_tried = self._all_right * kept + each_right, self._all_tried * kept + each_tried


class ModelDrafter:
    """Implements Drafter with `draft`, which runs the draft layers. A pass gives each of its rows one more draft.

    `sampler` chooses the draft with the random numbers that its position has in `draws`. So where the draft layers
    agree with the model, the draft is the token that the model will sample: at temperature 0.7, 23 % of a small model's
    drafts were right, and 9 % if the likeliest tokens were taken. Adjustments of logits are left out. A pass costs time
    before anything is verified, so it is run only if it pays, by its cost and that of `steps`. `clock` returns seconds.
    """

    def __init__(
        self,
        draft: Draft,
        sampler: Sampler,
        max_rows: int,
        lay_out: LayOut,
        draws: Draws,
        steps: StepCost,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._draft, self._lay_out, self._clock = draft, lay_out, clock
        self._sampler, self._draws = sampler, draws
        self._steps, self._passes = steps, StepCost()
        self._odds = Odds(max_rows)
        self._made: Int32Array = np.zeros(max_rows, np.int32)
        self._began: Int32Array = np.zeros(max_rows, np.int32)
        self._drafts: Int32Array = np.zeros((max_rows, MAX_DRAFTS), np.int32)
        self._idle = 0

    def start_row(self, row: int) -> None:
        """Forget the drafts of `row`."""
        self._made[row] = 0
        self._odds.start_row(row)

    def propose(
        self, tokens: Int32Array, rows: Int32Array, known: Int32Array, most: Int32Array
    ) -> tuple[Int32Array, Float32Array]:
        """Implement Drafter."""
        self._judge(tokens, rows, known)
        odds = self._odds.estimate(rows)
        counts = self._choose(most, odds)
        for done in range(int(counts.max(initial=0))):
            live = (counts > done).nonzero()[0]
            self._run_pass(tokens, rows[live], known[live] + done, done)
        self._made[rows], self._began[rows] = counts, known
        return counts, odds

    def _judge(self, tokens: Int32Array, rows: Int32Array, known: Int32Array) -> None:
        """Rate the drafts made before by the tokens that came."""
        drafted = (self._made[rows] > 0).nonzero()[0]
        if not len(drafted):
            return
        rows, known = rows[drafted], known[drafted]
        began = self._began[rows]
        came = np.minimum(self._made[rows], known - began)
        places = np.arange(MAX_DRAFTS)
        there = np.minimum(began[:, None] + places, tokens.shape[1] - 1)
        same = (tokens[rows[:, None], there] == self._drafts[rows]) & (places < came[:, None])
        right = np.logical_and.accumulate(same, axis=1).sum(axis=1, dtype=np.int32)
        self._odds.rate(rows, right, np.minimum(right + 1, came))

    def _choose(self, most: Int32Array, odds: Float32Array) -> Int32Array:
        """Return how many drafts each row gets."""
        counts = paying_passes(most, odds, self._steps, self._passes)
        self._idle = 0 if counts.any() else self._idle + 1
        if self._idle < PROBE_EVERY:
            return counts
        self._idle = 0
        return np.minimum(most, 1)

    def _run_pass(self, tokens: Int32Array, rows: Int32Array, ends: Int32Array, done: int) -> None:
        """Write the draft after the first `ends` [n] tokens of `rows` [n], the `done`-th of each."""
        started_s = self._clock()
        logits = self._draft(self._lay_out(rows, ends - 1))[: len(rows)]
        found = self._sampler.choose(logits, self._draws(rows, ends))
        tokens[rows, ends] = self._drafts[rows, done] = np.maximum(found, 0)  # -1 where logits are not finite
        self._passes.measure(len(rows), self._clock() - started_s)


MakeDrafter = Callable[[LayOut, Draws, StepCost], Drafter]


class RowDrafts:
    """Owns the drafter of a worker's rows, whose `tokens` [R, max_model_len] their owner keeps up to date."""

    def __init__(self, make: MakeDrafter, tokens: Int32Array, lay_out: LayOut, draws: Draws) -> None:
        self.step_cost = StepCost()
        self._drafter = make(lay_out, draws, self.step_cost)
        self._tokens = tokens

    def start_row(self, row: int) -> None:
        """Begin anew with `row`, which has other tokens now."""
        self._drafter.start_row(row)

    def write(
        self,
        rows: Int32Array,
        known: Int32Array,
        most: Int32Array,
        num_tokens: int,
        expected: Mapping[int, Sequence[int]],
    ) -> Int32Array | None:
        """Write drafts after the `known` [n] tokens of `rows` [n], and return how many; None if no row has any.

        A row has at most `most` [n]. `num_tokens` other tokens are in the step. Of rows in `expected`, by index, the
        next tokens are known, so the drafter is not asked for them.
        """
        asked = most.copy()
        asked[list(expected)] = 0
        counts, odds = self._drafter.propose(self._tokens, rows, known, asked)
        for i, tokens in expected.items():
            counts[i], odds[i] = min(len(tokens), most[i]), 1.0
            self._tokens[rows[i], known[i] : known[i] + counts[i]] = tokens[: counts[i]]
        if not counts.any():
            return None
        counts = paying_drafts(counts, odds, num_tokens, self.step_cost)
        return counts if counts.any() else None
