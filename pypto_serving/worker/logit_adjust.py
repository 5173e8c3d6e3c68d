"""Adjust a row's logits before sampling: bans, biases and masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pypto_serving.backend.base import LogitAdjustments
from pypto_serving.types.arrays import Float32Array, Int32Array
from pypto_serving.types.sampling import RowSampling
from pypto_serving.types.tokens import unpack_ids


@dataclass(frozen=True, slots=True)
class Adjustment:
    """The bans, biases and masks of one row's logits.

    - `bias_values` are added to the logits of `bias_ids`.
    - `banned_ids` cannot be chosen at positions below `banned_until`.
    - Only `allowed_ids` can be chosen, unless that is empty.

    Bans that leave no token are ignored, and so is a list of allowed ids that leaves none.
    """

    banned_ids: Int32Array
    banned_until: int
    bias_ids: Int32Array
    bias_values: Float32Array
    allowed_ids: Int32Array

    @classmethod
    def of(cls, sampling: RowSampling, prompt_len: int) -> Self | None:
        """Return the adjustment that `sampling` asks for, or None."""
        if not (sampling.min_tokens or sampling.bias_ids or sampling.allowed_ids):
            return None
        return cls(
            banned_ids=unpack_ids(sampling.banned_ids) if sampling.min_tokens else unpack_ids(b""),
            banned_until=prompt_len + sampling.min_tokens,
            bias_ids=unpack_ids(sampling.bias_ids),
            bias_values=np.frombuffer(sampling.bias_values, "<f4"),
            allowed_ids=unpack_ids(sampling.allowed_ids),
        )

    def is_due(self, position: int) -> bool:
        """Return whether `apply` changes the logits for the token at `position`."""
        return bool(self.bias_ids.size or self.allowed_ids.size or position < self.banned_until)

    def apply(self, logits: Float32Array, position: int) -> Float32Array:
        """Return the adjusted copy of logits [vocab] for the token at `position`."""
        biased = logits.copy()
        biased[self.bias_ids] += self.bias_values
        scores = biased
        if self.allowed_ids.size:
            scores = np.full_like(biased, -np.inf)
            scores[self.allowed_ids] = biased[self.allowed_ids]
            if not np.isfinite(scores.max()):
                scores = biased
        if position < self.banned_until:
            allowed, scores = scores, scores.copy()
            scores[self.banned_ids[self.banned_ids < len(logits)]] = -np.inf
            if not np.isfinite(scores.max()):
                scores = allowed
        return scores

    def mask(self, vocab_size: int) -> NDArray[np.uint32]:
        """Return `allowed_ids` as bits: bit v % 32 of word v // 32 allows token v."""
        bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
        bits[self.allowed_ids] = 1
        return np.packbits(bits, bitorder="little").view("<u4")


def pack(found: Sequence[Adjustment | None], masks: Sequence[NDArray[np.uint32] | None]) -> LogitAdjustments:
    """Lay out the adjustments of n rows as arrays for a device; `masks[i]` are the bits of row i's allowed ids."""
    bias_starts, bias_ids = _ragged([() if each is None else each.bias_ids for each in found], np.int32)
    _, bias_values = _ragged([() if each is None else each.bias_values for each in found], np.float32)
    banned_starts, banned_ids = _ragged([() if each is None else each.banned_ids for each in found], np.int32)
    masked = [mask for mask in masks if mask is not None]
    mask_rows = np.full(len(found), -1, np.int32)
    mask_rows[[i for i, mask in enumerate(masks) if mask is not None]] = np.arange(len(masked))
    return LogitAdjustments(
        bias_starts=bias_starts,
        bias_ids=bias_ids,
        bias_values=bias_values,
        masks=np.stack(masked) if masked else np.empty((0, 0), np.uint32),
        mask_rows=mask_rows,
        banned_starts=banned_starts,
        banned_ids=banned_ids,
        banned_until=np.array([0 if each is None else each.banned_until for each in found], np.int32),
    )


def _ragged(lists: Sequence[Any], dtype: DTypeLike) -> tuple[Int32Array, NDArray[Any]]:
    """Concatenate lists. Return starts int32 [n + 1] and values; list i is values[starts[i] : starts[i + 1]]."""
    starts = np.zeros(len(lists) + 1, np.int32)
    np.cumsum([len(each) for each in lists], out=starts[1:])
    return starts, np.concatenate([np.asarray(each, dtype) for each in lists]) if lists else np.empty(0, dtype)
