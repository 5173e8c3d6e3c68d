"""Inputs and outputs of a sampler, for all rows of a step at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pypto_serving.types.adjustments import LogitAdjustments
from pypto_serving.types.arrays import Float32Array, Int32Array
from pypto_serving.types.logprobs import PromptLogprobs

DRAW = np.dtype(
    [("random", "f8"), ("top_p", "f8"), ("min_p", "f8"), ("temperature", "f4"), ("top_k", "i4")],
)
"""Sampling parameters of one token and its random number in [0, 1); `struct Draw` of csrc/ops.h.

Temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 turn the filter off.
"""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of n tokens, and of the w best tokens of their rows, best first.

    values float32 [n], ranks int32 [n] (1 is best), best_ids int32 [n, w], best_values float32 [n, w].
    """

    values: Float32Array
    ranks: Int32Array
    best_ids: Int32Array
    best_values: Float32Array

    @classmethod
    def empty(cls, n: int, w: int) -> Logprobs:
        """Allocate uninitialized arrays."""
        one, best = (n,), (n, w)
        return cls(
            np.empty(one, np.float32), np.empty(one, np.int32), np.empty(best, np.int32), np.empty(best, np.float32)
        )

    def pack(self) -> PromptLogprobs:
        """Encode for messages."""
        return PromptLogprobs(
            self.values.astype("<f4", copy=False).tobytes(),
            self.ranks.astype("<i4", copy=False).tobytes(),
            self.best_ids.astype("<i4", copy=False).tobytes(),
            self.best_values.astype("<f4", copy=False).tobytes(),
        )

    @classmethod
    def unpack(cls, packed: PromptLogprobs) -> Logprobs:
        """Decode to read-only arrays."""
        values: Float32Array = np.frombuffer(packed.values, "<f4")
        ids: Int32Array = np.frombuffer(packed.top_ids, "<i4").reshape(len(values), -1)
        best: Float32Array = np.frombuffer(packed.top_values, "<f4").reshape(len(values), -1)
        return cls(values, np.frombuffer(packed.ranks, "<i4"), ids, best)


class Sampler(Protocol):
    """Samples tokens from float32 logits [s, vocab]. The result of a row depends on that row only."""

    def choose(
        self, logits: Float32Array, draws: NDArray[np.void], adjustments: LogitAdjustments | None = None
    ) -> Int32Array:
        """Return tokens int32 [s] for DRAWs [s]; -1 where a row's logits are not finite, before any adjustment.

        `adjustments` has one entry for each row. They change a copy; `logits` stay as they are.

        Greedy, or temperature, min_p, top_k, top_p in this order, and then the inverse of the cumulative
        distribution. The distribution is in order of id without top_k and top_p, else best first. Ties go to the
        lowest id.
        """

    def logprobs(self, logits: Float32Array, rows: Int32Array, tokens: Int32Array, width: int) -> Logprobs:
        """Return log-probabilities of `tokens` [n] and the `width` best tokens (at most vocab) in `rows` [n] of logits.

        The logits of these rows must be finite.
        """
