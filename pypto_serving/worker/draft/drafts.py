"""RowDrafts: the drafts of a batch, from a Drafter, as many as pay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pypto_serving.backend.base import Drafter
from pypto_serving.types.arrays import Int32Array
from pypto_serving.worker.draft.model import Draws, LayOut
from pypto_serving.worker.draft.pacing import StepCost, paying_drafts

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
