"""Drafts of rows. RowDrafts keeps the drafts of a Drafter that pay; ModelDrafter makes them with draft layers."""

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
"""Weight of earlier measurements decays by this factor at each new one."""
PRIOR_SLOPE = 0.1
"""Assumed before any measurement: time per token divided by the time of a step without tokens."""
PRIOR_SPREAD = 0.25
"""Variance of the number of tokens per step at which measurements and PRIOR_SLOPE have equal weight."""
LEAST_GAIN = 1.1
"""Required ratio of a draft's expected gain to its cost; above 1, since both are estimates."""
MOST_LATE = 3.0
"""Measured times are cut to this many times the expected time, so that outliers count less."""


class StepCost:
    """Owns the cost model of decode steps, or of draft-layer passes: a + b * tokens seconds.

    a and b are fitted by least squares, with exponentially decaying weights.
    """

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0

    def measure(self, num_tokens: int, elapsed_s: float) -> None:
        """Record the time of a step or pass of `num_tokens`, including drafts."""
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
        """Return whether there is any measurement."""
        return self._weight > 0

    def seconds(self) -> tuple[float, float]:
        """Return a and b: the seconds of a step without tokens, and the seconds per token."""
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

    `odds` [n]: probability that a draft is right if all drafts before it are. All n rows sample a token anyway.

    A draft adds time to the step, and with its probability a token to the output. To maximize tokens per second, take
    drafts from the likeliest on, as long as a draft adds more tokens per second than the step has without it
    (Dinkelbach, On Nonlinear Fractional Programming, 1967). So where a step mostly reads weights, a few rows get many
    drafts each, but of many rows only almost certain drafts are taken.
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
    """Return how many drafts to make for each of n rows, at most `most` [n], when making them takes draft-layer passes.

    Pass j makes the j-th draft of every row that has one. `odds` [n]: probability that a draft is right if all drafts
    before it are. Returns `most` until a step and a pass have been measured.
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
"""Makes the inputs of a pass over the token at `positions` [n] of each of `rows` [n]; earlier tokens are computed."""
Draws = Callable[[Int32Array, Int32Array], NDArray[np.void]]
"""Returns the DRAWs with which the verifying step will sample the tokens at `positions` [n] of `rows` [n]."""

PROBE_EVERY = 32
"""While drafts do not pay, make one draft per row every this many rounds, to notice when they pay again."""
KEPT = 0.9
"""A row's record of right and wrong drafts decays by this factor at each new rating."""
PRIOR = 2.0
"""Weight, in drafts, of the average over all rows in the odds of one row."""


class Odds:
    """Owns each row's probability that a draft is right if all before it are, from an exponentially decaying record.

    A new row starts with the average over all rows.
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
        """Record that `right` [n] of the `tried` [n] drafts of `rows` [n] were right; omit drafts after a wrong one."""
        self._right[rows] = self._right[rows] * KEPT + right
        self._tried[rows] = self._tried[rows] * KEPT + tried
        kept = KEPT ** (1 / max(1, len(rows)))
        for each_right, each_tried in zip(right.tolist(), tried.tolist(), strict=True):
            self._all_right, self._all_tried = self._all_right * kept + each_right, self._all_tried * kept + each_tried


class ModelDrafter:
    """Implements Drafter with `draft`, which runs the draft layers. Each pass adds one draft to each of its rows.

    `sampler` samples a draft with the random numbers that `draws` gives for its position. So where the draft layers
    agree with the model, the draft is the token that the model will sample: at temperature 0.7, 23 % of a small model's
    drafts were right, but 9 % when the likeliest tokens were taken. Logit adjustments are not applied. A pass takes
    time of its own, so it is run only if it pays, by its cost and that of `steps`. `clock` returns seconds.
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
        """Rate the drafts of the last round by the tokens that followed."""
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
        """Return how many drafts to make for each row."""
        counts = paying_passes(most, odds, self._steps, self._passes)
        self._idle = 0 if counts.any() else self._idle + 1
        if self._idle < PROBE_EVERY:
            return counts
        self._idle = 0
        return np.minimum(most, 1)

    def _run_pass(self, tokens: Int32Array, rows: Int32Array, ends: Int32Array, done: int) -> None:
        """Write draft number `done` of each of `rows` [n], at positions `ends` [n]."""
        started_s = self._clock()
        logits = self._draft(self._lay_out(rows, ends - 1))[: len(rows)]
        found = self._sampler.choose(logits, self._draws(rows, ends))
        tokens[rows, ends] = self._drafts[rows, done] = np.maximum(found, 0)  # -1 where logits are not finite
        self._passes.measure(len(rows), self._clock() - started_s)


MakeDrafter = Callable[[LayOut, Draws, StepCost], Drafter]


class RowDrafts:
    """Owns the drafter of a worker's rows. The owner of the rows keeps `tokens` [R, max_model_len] up to date."""

    def __init__(self, make: MakeDrafter, tokens: Int32Array, lay_out: LayOut, draws: Draws) -> None:
        self.step_cost = StepCost()
        self._drafter = make(lay_out, draws, self.step_cost)
        self._tokens = tokens

    def start_row(self, row: int) -> None:
        """Forget the record of `row`, which now has other tokens."""
        self._drafter.start_row(row)

    def write(
        self,
        rows: Int32Array,
        known: Int32Array,
        most: Int32Array,
        num_tokens: int,
        expected: Mapping[int, Sequence[int]],
    ) -> Int32Array | None:
        """Write drafts after the `known` [n] tokens of `rows` [n]. Return their numbers [n], or None if all are 0.

        A row gets at most `most` [n]. The step has `num_tokens` other tokens. `expected` gives the next tokens of some
        rows, by index into `rows`; they become the drafts, and the drafter is not asked.
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
