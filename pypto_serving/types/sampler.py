"""Inputs and outputs of a sampler, for all rows of a step at once, on the host and on devices.

Before a token is chosen, a row's logits are adjusted in float32, in this order:

1. Add `logit_bias`.
2. Penalties: repetition, over prompt and output, divides positive logits and multiplies others; then subtract frequency
   times the token's count in the output, and presence if the output has the token.
3. Mask: exclude tokens that it does not allow. Ignored if no token would be left.
4. Bans: exclude end tokens before there are `min_tokens`, and the last token of a bad word whose other tokens end the
   output. Ignored if no token would be left.

Order and formulas of 1 and 2 are vLLM's (`vllm/v1/sample/sampler.py`: penalties come after logits processors, and logit
bias is one). There, 3 and 4 come first, with the same result. Then temperature, min_p, top_k and top_p are applied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pypto_serving.types.arrays import Float32Array, Int32Array
from pypto_serving.types.step import PromptLogprobs

MaskArray = NDArray[np.uint32]
"""Bits in words of 32: bit v % 32 of word v // 32 belongs to token v."""

CHANGE = np.dtype(
    [("repetition", "f4"), ("frequency", "f4"), ("presence", "f4")]
    + [(name, "i4") for name in ("prompt_len", "banned_until")]
    + [(f"{name}_{end}", "i4") for name in ("bias", "ban", "word") for end in ("from", "to")],
)
"""The adjustments of one row; `struct Change` in csrc/ops.h. Half-open intervals index the arrays of a ChangeTable.

Output tokens have positions from `prompt_len` on. Bans [ban_from, ban_to) apply at positions below `banned_until`.
Neutral penalties are 1, 0 and 0.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeTable:
    """The adjustments of all R rows of a worker. A new table is made when a row with adjustments is added or removed.

    changes [R]: CHANGEs; entries of rows without adjustments are never read.
    bias_ids int32, bias_values float32: values to add. banned_ids int32: the bans of `min_tokens`.
    words, word_starts int32: bad word w is the tokens words[word_starts[w] : word_starts[w + 1]].
    """

    changes: NDArray[np.void]
    bias_ids: Int32Array
    bias_values: Float32Array
    banned_ids: Int32Array
    word_starts: Int32Array
    words: Int32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitAdjustments:
    """Adjustments of n rows of logits: on the host, one entry per row of logits; on a device, per sampling row.

    rows [n]: the worker's row, an index into `table.changes` and `tokens`; -1 for no changes but a mask.
    positions [n]: position of the token to choose; of the first one if a device chooses several.
    known [n]: how many of the row's tokens are in `tokens`. On the host, equal to `positions`. A device has sampled or
        drafted later tokens, up to its position, itself.
    tokens [R, max_model_len]: tokens by row. The first `known` ones do not change until another request gets the row,
        whose dispatches come later.
    masks [m, ceil(vocab / 32)]: allowed tokens as bits; mask_rows [n]: row of `masks`, or -1.
    """

    rows: Int32Array
    positions: Int32Array
    known: Int32Array
    tokens: Int32Array
    table: ChangeTable
    masks: MaskArray
    mask_rows: Int32Array


DRAW = np.dtype(
    [("random", "f8"), ("top_p", "f8"), ("min_p", "f8"), ("temperature", "f4"), ("top_k", "i4")],
)
"""Sampling parameters of one token and its random number in [0, 1); `struct Draw` in csrc/ops.h.

Temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 disable the filter.
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
    """Samples tokens from float32 logits [s, vocab]. The result of a row depends only on that row."""

    def choose(
        self, logits: Float32Array, draws: NDArray[np.void], adjustments: LogitAdjustments | None = None
    ) -> Int32Array:
        """Return tokens int32 [s] for DRAWs [s]; -1 if a row's logits are not finite before adjustment.

        `adjustments` has one entry for each row, and is applied to a copy of `logits`.

        Choose greedily, or apply temperature, min_p, top_k, top_p in this order, then invert the cumulative
        distribution. It is in order of id; with top_k or top_p, best first. Ties go to the lowest id.
        """

    def logprobs(self, logits: Float32Array, rows: Int32Array, tokens: Int32Array, width: int) -> Logprobs:
        """Return log-probabilities of `tokens` [n] and the `width` best tokens (at most vocab) in `rows` [n] of logits.

        The logits of these rows must be finite.
        """
