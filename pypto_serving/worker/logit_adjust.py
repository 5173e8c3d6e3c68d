"""RowAdjustments: biases, penalties, bans and masks of a worker's rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pypto_serving.types.arrays import Int32Array, unpack_ids
from pypto_serving.types.sampler import CHANGE, ChangeTable, LogitAdjustments
from pypto_serving.types.sampling import INT32_MAX, RowSampling
from pypto_serving.worker.masks import RowMasks


class RowAdjustments:
    """Owns the changes to logits of R rows, set once with the row. They cost nothing while no row has any.

    `tokens` [R, max_model_len] are the rows' tokens, which their owner keeps up to date. Penalties and bad words are
    found from them when a token is sampled, so nothing has to follow what a row appends, takes back or starts with.
    """

    def __init__(self, tokens: Int32Array, vocab_size: int, max_drafts: int = 0) -> None:
        self.masks = RowMasks(len(tokens), vocab_size, max_drafts)
        self._tokens = tokens
        self._given: dict[int, tuple[RowSampling, int]] = {}
        self._until: Int32Array = np.zeros(len(tokens), np.int32)
        self._table: ChangeTable | None = None

    def set_row(self, row: int, sampling: RowSampling, prompt_len: int) -> None:
        """Set what `sampling` asks for. The prompt of `row` has `prompt_len` tokens."""
        if sampling.allowed_ids:
            self.masks.allow(row, unpack_ids(sampling.allowed_ids))
        if sampling.bias_ids or sampling.bad_words or sampling.has_penalties:
            self._until[row] = INT32_MAX
        elif sampling.min_tokens and sampling.banned_ids:
            self._until[row] = prompt_len + sampling.min_tokens
        else:
            return
        self._given[row] = sampling, prompt_len
        self._table = None

    def clear_row(self, row: int) -> None:
        """Forget the changes of `row`."""
        self.masks.clear(row)
        if self._given.pop(row, None) is not None:
            self._until[row] = 0
            self._table = None

    def for_rows(self, rows: Int32Array, positions: Int32Array, known: Int32Array) -> LogitAdjustments | None:
        """Return what changes the logits of `rows` [n] for the tokens at `positions` [n]; None if nothing does.

        See LogitAdjustments for `known` [n]. Rows may repeat, with their next positions.
        """
        if not (self._given or self.masks):
            return None
        due = np.where(known < self._until[rows], rows, np.int32(-1))
        masked = self.masks.find(rows)
        if max(due.max(initial=-1), masked.max(initial=-1)) < 0:
            return None
        if self._table is None:
            self._table = _table(self._given, len(self._until))
        return LogitAdjustments(
            rows=due,
            positions=positions,
            known=known,
            tokens=self._tokens,
            table=self._table,
            masks=self.masks.bits,
            mask_rows=masked,
        )


def _table(given: dict[int, tuple[RowSampling, int]], num_rows: int) -> ChangeTable:
    """Lay out the changes of the rows in `given`."""
    changes = np.zeros(num_rows, CHANGE)
    sampling = [each for each, _ in given.values()]
    biases = [np.frombuffer(each.bias_values, "<f4") for each in sampling]
    bans = [unpack_ids(each.banned_ids) for each in sampling]
    words = [unpack_ids(word) for each in sampling for word in each.bad_words]
    counts = np.array(
        [[len(bias), len(ban), len(each.bad_words)] for bias, ban, each in zip(biases, bans, sampling, strict=True)]
    ).reshape(-1, 3)
    ends = counts.cumsum(axis=0)
    for i, (row, (each, prompt_len)) in enumerate(given.items()):
        intervals = np.stack([ends[i] - counts[i], ends[i]], axis=1).ravel().tolist()
        penalties = each.repetition_penalty, each.frequency_penalty, each.presence_penalty
        changes[row] = (*penalties, prompt_len, prompt_len + each.min_tokens, *intervals)
    return ChangeTable(
        changes=changes,
        bias_ids=_joined([unpack_ids(each.bias_ids) for each in sampling], np.int32),
        bias_values=_joined(biases, np.float32),
        banned_ids=_joined(bans, np.int32),
        word_starts=np.cumsum([0, *map(len, words)], dtype=np.int32),
        words=_joined(words, np.int32),
    )


def _joined(arrays: Sequence[NDArray[Any]], dtype: DTypeLike) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype)
