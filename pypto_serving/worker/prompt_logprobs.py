"""Log-probabilities of prompt tokens: find the necessary logits in a dispatch, and compute the values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pypto_serving.types.arrays import Float32Array, Int32Array
from pypto_serving.types.sampler import DRAW, Sampler
from pypto_serving.types.sampling import RowSampling
from pypto_serving.types.step import NOT_FINITE, RowFault, RowPromptLogprobs

BAD_PROMPT = "the model's logits are not finite for this prompt; the prompt or the weights may be corrupt"


class PromptSpan(NamedTuple):
    """n consecutive tokens of one row in a dispatch, whose logits give the log-probabilities of their successors.

    row: the worker's row; owner: its index in the dispatch.
    first: number of the row's tokens in the dispatch before these.
    targets int32 [n]: the successor of each token.
    width: how many most likely tokens to return for each.
    """

    row: int
    owner: int
    first: int
    targets: Int32Array
    width: int


class PromptLogprobRows:
    """Owns the set of rows that need more prompt log-probabilities, for RowBatch. False if it is empty.

    The log-probabilities of the tokens at [1, n) of a prompt come from the logits of those at [0, n - 1).
    """

    def __init__(self) -> None:
        self._left: dict[int, tuple[int, int, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._left)

    def set_row(self, row: int, sampling: RowSampling, prompt_len: int) -> None:
        """Begin a row, after its first `num_prompt_logprobs_sent` log-probabilities."""
        self.clear_row(row)
        if sampling.num_prompt_logprobs >= 0:
            self._left[row] = sampling.num_prompt_logprobs_sent, prompt_len - 1, sampling.num_prompt_logprobs

    def clear_row(self, row: int) -> None:
        """Forget a row."""
        self._left.pop(row, None)

    def take_spans(
        self, rows: Int32Array, computed: Int32Array, counts: Int32Array, tokens: Int32Array
    ) -> list[PromptSpan]:
        """Return the spans of a dispatch that computes `counts` tokens of `rows` after the `computed` ones."""
        found = []
        owners = {row: owner for owner, row in enumerate(rows.tolist()) if row in self._left}
        for row, owner in owners.items():
            begin, end, width = self._left[row]
            start, stop = int(computed[owner]), int(computed[owner] + counts[owner])
            begin, upto = max(begin, start), min(stop, end)
            if begin < upto:
                targets = tokens[row, begin + 1 : upto + 1].copy()
                found.append(PromptSpan(row, owner, begin - start, targets, width))
                self._left[row] = upto, end, width
            if upto == end:
                del self._left[row]
        return found


def logits_rows(spans: Sequence[PromptSpan], query_start: Int32Array) -> Int32Array:
    """Return the indices in the dispatch of the tokens whose logits are needed, in order."""
    firsts = [int(query_start[each.owner]) + each.first for each in spans]
    ends = [first + len(each.targets) for first, each in zip(firsts, spans, strict=True)]
    return np.concatenate([np.arange(*span, dtype=np.int32) for span in zip(firsts, ends, strict=True)])


def num_logits(spans: Sequence[PromptSpan]) -> int:
    """Return the number of rows of logits for `spans`."""
    return sum(len(each.targets) for each in spans)


def compute_prompt_logprobs(
    spans: Sequence[PromptSpan], logits: Float32Array, sampler: Sampler
) -> tuple[list[RowPromptLogprobs], list[RowFault]]:
    """Return the log-probabilities of the `spans`, and faults of rows whose logits are not finite.

    `logits` [n, vocab] are those of all spans, in order.
    """
    found, faults, end = [], [], 0
    for row, _, _, targets, width in spans:
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
