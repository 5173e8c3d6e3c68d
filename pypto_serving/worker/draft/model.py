"""ModelDrafter: propose what the draft layers of a model predict, one pass for each draft."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pypto_serving.backend.base import Draft, StepInputs
from pypto_serving.types.arrays import Float32Array, Int32Array
from pypto_serving.types.config import MAX_DRAFTS
from pypto_serving.types.sampler import Sampler
from pypto_serving.worker.draft.pacing import StepCost, paying_passes

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

    `sampler` chooses it with the numbers that its position has in `draws`. So a row that samples gets what the model
    would choose, if its draft layers say the same: at temperature 0.7, 23 % of a small model's drafts were right
    instead of 9 % of the likeliest tokens. What changes logits of a row is left out. A pass costs time before anything
    is verified, so only those are run that pay by what passes and `steps` cost. `clock` returns seconds.
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
