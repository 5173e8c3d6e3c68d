"""Changes to logits before a token is chosen, as arrays for samplers on the host and on devices.

A row's logits are changed in this order, in float32; only the penalties depend on what stands before them:

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

import numpy as np
from numpy.typing import NDArray

from pypto_serving.types.arrays import Float32Array, Int32Array

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
