"""Score prompt tokens: which logits of a dispatch belong to them, and their log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pypto_serving.types.arrays import Float32Array, Int32Array
from pypto_serving.types.draws import DRAW, Sampler
from pypto_serving.types.sampling import RowSampling
from pypto_serving.types.step import NOT_FINITE, RowFault, RowPromptLogprobs

BAD_PROMPT = "the model's logits are not finite for this prompt; the prompt or the weights may be corrupt"


class Scored(NamedTuple):
    """Tokens of one row that a dispatch computes and whose logits score the tokens behind them.

    row: the worker's row; owner: its index in the dispatch.
    first: how many of the row's tokens in the dispatch precede them.
    targets int32 [n]: the n tokens behind them, which are scored.
    width: how many of the most likely tokens are returned for each.
    """

    row: int
    owner: int
    first: int
    targets: Int32Array
    width: int


class PromptScoring:
    """Owns which rows have prompt tokens left to score. A part of RowBatch. False while there are none.

    Of a prompt of n tokens, those at [1, n) are scored, by the logits of those at [0, n - 1).
    """

    def __init__(self) -> None:
        self._left: dict[int, tuple[int, int, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._left)

    def set(self, row: int, sampling: RowSampling, prompt_len: int) -> None:
        """Begin a row; its first `num_scored` log-probabilities were delivered before."""
        self.clear(row)
        if sampling.num_prompt_logprobs >= 0:
            self._left[row] = sampling.num_scored, prompt_len - 1, sampling.num_prompt_logprobs

    def clear(self, row: int) -> None:
        """Forget a row."""
        self._left.pop(row, None)

    def take(self, rows: Int32Array, computed: Int32Array, counts: Int32Array, tokens: Int32Array) -> list[Scored]:
        """Return what a dispatch scores that computes `counts` tokens of `rows` behind the `computed` ones."""
        found = []
        owners = {row: owner for owner, row in enumerate(rows.tolist()) if row in self._left}
        for row, owner in owners.items():
            begin, end, width = self._left[row]
            start, stop = int(computed[owner]), int(computed[owner] + counts[owner])
            begin, upto = max(begin, start), min(stop, end)
            if begin < upto:
                targets = tokens[row, begin + 1 : upto + 1].copy()
                found.append(Scored(row, owner, begin - start, targets, width))
                self._left[row] = upto, end, width
            if upto == end:
                del self._left[row]
        return found


def logits_rows(scored: Sequence[Scored], query_start: Int32Array) -> Int32Array:
    """Return the indices in the dispatch of the tokens whose logits are needed, in order."""
    firsts = [int(query_start[each.owner]) + each.first for each in scored]
    ends = [first + len(each.targets) for first, each in zip(firsts, scored, strict=True)]
    return np.concatenate([np.arange(*span, dtype=np.int32) for span in zip(firsts, ends, strict=True)])


def num_logits(scored: Sequence[Scored]) -> int:
    """Return how many rows of logits a dispatch has for `scored`."""
    return sum(len(each.targets) for each in scored)


def score(
    scored: Sequence[Scored], logits: Float32Array, sampler: Sampler
) -> tuple[list[RowPromptLogprobs], list[RowFault]]:
    """Return the log-probabilities of `scored`, whose `logits` [n, vocab] lie one behind the other."""
    found, faults, end = [], [], 0
    for row, _, _, targets, width in scored:
        start, end = end, end + len(targets)
        own = logits[start:end]
        if (sampler.choose(own, _greedy(len(targets))) < 0).any():
            faults.append(RowFault(row, NOT_FINITE, BAD_PROMPT))
            continue
        every = np.arange(len(targets), dtype=np.int32)
        found.append(RowPromptLogprobs(row, sampler.logprobs(own, every, targets, width).pack()))
    return found, faults


def _greedy(count: int) -> NDArray[np.void]:
    draws = np.zeros(count, DRAW)
    draws["top_p"] = 1.0
    return draws
