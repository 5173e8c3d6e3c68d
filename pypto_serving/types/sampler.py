"""Inputs and outputs of a sampler, for all rows of a step at once, on the host and on devices.

A row's logits are changed in this order, in float32, before a token is chosen. Only the penalties depend on the tokens
before them:

1. `logit_bias` is added.
2. Penalties: repetition, over the prompt and the output, divides a positive logit and multiplies others; then frequency
   times the count of the token in the output is subtracted, then presence if the output has the token.
3. A mask: tokens that it does not allow cannot be chosen. It is ignored if it leaves none.
4. Bans: end tokens before there are `min_tokens`, and the last token of a bad word whose other tokens end the output.
   They are ignored if they leave none.

Order and formulas of 1 and 2 are those of vLLM (`vllm/v1/sample/sampler.py`: penalties come after logits processors,
and logit bias is one). 3 and 4 come first there, which is the same. Then temperature, min_p, top_k and top_p follow.
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
"""The changes of one row; `struct Change` of csrc/ops.h. Intervals are half open and index the arrays of a ChangeTable.

Output tokens stand at positions from `prompt_len` on. Bans [ban_from, ban_to) hold at positions below `banned_until`.
Neutral penalties are 1, 0 and 0.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeTable:
    """The changes of all R rows of a worker. A new table is made when a row with changes comes or goes.

    changes [R]: CHANGEs; those of a row without changes are never read.
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
    """How the logits of n rows change. The host has an entry for each row of logits, a device for each sampling row.

    rows [n]: the worker's row, an index into `table.changes` and `tokens`; -1 for no changes but a mask.
    positions [n]: of the token to choose, or of the first where a device chooses several.
    known [n]: how many of the row's tokens `tokens` holds. On the host that is `positions`. A device has sampled or
        drafted those from there to its position itself.
    tokens [R, max_model_len]: tokens by row. The first `known` do not change until the row is given to another request,
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
