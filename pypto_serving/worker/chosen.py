"""What the sampling rows of a dispatch got: tokens, log-probabilities, or a fault."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pypto_serving.backend.base import SampledTokens
from pypto_serving.types.arrays import Float32Array, Int32Array
from pypto_serving.types.draws import Sampler
from pypto_serving.types.step import RowFault, RowLogprobs
from pypto_serving.types.tokens import pack_ids
from pypto_serving.worker.batch import Dispatch
from pypto_serving.worker.sampler import RowSamplers, SampledLogprobs

_NOT_FINITE = "the model's logits are not finite for this request; its prompt may be corrupt, or the weights are"


@dataclass(frozen=True, slots=True)
class Chosen:
    """`counts[i]` of `token_ids` for the i-th row that samples, None for one each. Rows in `faults` end there."""

    token_ids: Int32Array
    counts: Int32Array | None
    logprobs: list[RowLogprobs]
    faults: list[RowFault]

    def each(self, num_rows: int) -> Int32Array:
        """`counts`, written out."""
        return np.ones(num_rows, np.int32) if self.counts is None else self.counts


def from_logits(dispatch: Dispatch, logits: Float32Array, samplers: RowSamplers, sampler: Sampler) -> Chosen:
    """Choose on the host, one token at every row of `logits` [s, vocab], and keep those whose drafts were right."""
    rows, positions, drafts = dispatch.rows, dispatch.positions, dispatch.num_drafts
    if not len(rows):
        return Chosen(np.empty(0, np.int32), None, [], [])
    if drafts is None:
        tokens, values = samplers.sample(logits, rows, positions, sampler)
        return _chosen(dispatch, tokens, None, [_logprobs(int(rows[i]), value) for i, value in values.items()])
    widths = 1 + drafts
    first = widths.cumsum() - widths
    offsets = np.arange(len(logits), dtype=np.int32) - first.repeat(widths).astype(np.int32)
    owner = rows.repeat(widths)
    tokens, values = samplers.sample(logits, owner, positions.repeat(widths) + offsets, sampler)
    counts = accepted(tokens, _drafted(dispatch), first, widths)
    kept = offsets < counts.repeat(widths)
    logprobs = [_logprobs(int(owner[i]), value) for i, value in values.items() if kept[i]]
    return _chosen(dispatch, tokens[kept], counts, logprobs)


def _drafted(dispatch: Dispatch) -> Int32Array:
    """The token that stands behind each one whose logits were computed: a draft, or anything behind the last."""
    ids, at = dispatch.inputs.token_ids, dispatch.inputs.logits_rows + 1
    return ids[np.minimum(at, len(ids) - 1)]


def accepted(tokens: Int32Array, drafted: Int32Array, first: Int32Array, widths: Int32Array) -> Int32Array:
    """How many tokens [n] each row keeps: those up to and with the first that is not the draft behind it.

    `tokens`, `drafted` [s] hold `widths[i]` of row i from `first[i]` on; the draft behind a row's last does not count.
    """
    wrong = np.flatnonzero(np.append(tokens != drafted, True))
    misses = wrong[np.searchsorted(wrong, first)] - first
    counts: Int32Array = np.minimum(misses + 1, widths).astype(np.int32)
    return counts


def from_device(dispatch: Dispatch, sampled: SampledTokens, num_logprobs: Int32Array) -> Chosen:
    """Take what the device chose; `num_logprobs` [n] says what rows asked for."""
    logprobs: list[RowLogprobs] = []
    if sampled.logprobs is not None:
        found = sampled.logprobs
        for i, index in enumerate(np.arange(len(dispatch.rows)).repeat(sampled.counts).tolist()):
            width = int(num_logprobs[index])
            if width >= 0 and sampled.token_ids[i] >= 0:
                best, values = found.best_ids[i, :width], found.best_values[i, :width]
                value = SampledLogprobs(float(found.values[i]), int(found.ranks[i]), best, values)
                logprobs.append(_logprobs(int(dispatch.rows[index]), value))
    counts = sampled.counts if dispatch.num_drafts is not None else None
    return _chosen(dispatch, sampled.token_ids, counts, logprobs)


def _chosen(dispatch: Dispatch, tokens: Int32Array, counts: Int32Array | None, logprobs: list[RowLogprobs]) -> Chosen:
    """Make a fault of a token of -1, which is always the last of its row."""
    failed = tokens < 0
    if not failed.any():
        return Chosen(tokens, counts, logprobs, [])
    counts = np.ones(len(dispatch.rows), np.int32) if counts is None else counts.copy()
    owners = np.arange(len(counts)).repeat(counts)[failed]
    counts[owners] -= 1
    faults = [RowFault(int(row), "not_finite", _NOT_FINITE) for row in dispatch.rows[owners]]
    return Chosen(tokens[~failed], counts, logprobs, faults)


def _logprobs(row: int, values: SampledLogprobs) -> RowLogprobs:
    top = values.top_logprobs.astype("<f4").tobytes()
    return RowLogprobs(row, values.logprob, values.rank, pack_ids(values.top_ids), top)
