"""DispatchResult: the sampled tokens, log-probabilities and faults of a dispatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from pypto_serving.backend.base import SampledTokens
from pypto_serving.types.arrays import Float32Array, Int32Array
from pypto_serving.types.sampler import Sampler
from pypto_serving.types.step import NOT_FINITE, RowFault, RowLogprobs, RowPromptLogprobs
from pypto_serving.worker.batch import Dispatch
from pypto_serving.worker.guides import StepConstraints
from pypto_serving.worker.sampler import RowSamplers, pack_logprobs

_NOT_FINITE = "the model's logits are not finite for this request; the prompt or the weights may be corrupt"


class DispatchResult(NamedTuple):
    """The result of a dispatch: `counts[i]` of `token_ids` for the i-th sampling row; None for one each.

    `accepted[i]`: number of the row's drafts among its tokens; None if no row had drafts. `prompt_logprobs` are for
    rows that ask for them.
    """

    token_ids: Int32Array
    counts: Int32Array | None
    logprobs: list[RowLogprobs]
    faults: list[RowFault]
    accepted: Int32Array | None = None
    prompt_logprobs: Sequence[RowPromptLogprobs] = ()

    def each(self, num_rows: int) -> Int32Array:
        """Return `counts` int32 [num_rows], with ones if it is None."""
        return np.ones(num_rows, np.int32) if self.counts is None else self.counts

    def each_accepted(self, num_rows: int) -> Int32Array:
        """Return `accepted` int32 [num_rows], with zeros if it is None."""
        return np.zeros(num_rows, np.int32) if self.accepted is None else self.accepted


def sample_and_verify(
    dispatch: Dispatch,
    logits: Float32Array,
    samplers: RowSamplers,
    sampler: Sampler,
    limits: Mapping[int, int] = MappingProxyType({}),
) -> DispatchResult:
    """Sample on the host: one token for each row of `logits` [s, vocab]. Keep tokens up to the first wrong draft.

    If `limits` has row i, it keeps at most 1 + limits[i] tokens, since later ones were sampled without their mask.
    """
    rows, positions, drafts = dispatch.rows, dispatch.positions, dispatch.num_drafts
    if not len(rows):
        return DispatchResult(np.empty(0, np.int32), None, [], [])
    if drafts is None:
        tokens, values = samplers.sample(logits, rows, positions, sampler)
        return _make_result(dispatch, tokens, None, [RowLogprobs(int(rows[i]), value) for i, value in values.items()])
    widths = 1 + drafts
    first = widths.cumsum() - widths
    offsets = np.arange(len(logits), dtype=np.int32) - first.repeat(widths).astype(np.int32)
    owner = rows.repeat(widths)
    tokens, values = samplers.sample(logits, owner, positions.repeat(widths) + offsets, sampler)
    counts = verify_drafts(tokens, _following_drafts(dispatch, len(logits)), first, widths)
    for i, limit in limits.items():
        counts[i] = min(counts[i], 1 + limit)
    kept = offsets < counts.repeat(widths)
    logprobs = [RowLogprobs(int(owner[i]), value) for i, value in values.items() if kept[i]]
    return _make_result(dispatch, tokens[kept], counts, logprobs)


def _following_drafts(dispatch: Dispatch, num_logits: int) -> Int32Array:
    """Return the draft after each sampled token; any value after a row's last token."""
    ids, at = dispatch.inputs.token_ids, dispatch.inputs.logits_rows[:num_logits] + 1
    return ids[np.minimum(at, len(ids) - 1)]


def verify_drafts(tokens: Int32Array, drafted: Int32Array, first: Int32Array, widths: Int32Array) -> Int32Array:
    """Return how many sampled tokens each row keeps, int32 [n]: up to the first that differs from its draft, inclusive.

    `tokens` and `drafted` [s] have `widths[i]` entries of row i from `first[i]` on. The last one has no draft.
    """
    wrong = np.flatnonzero(np.append(tokens != drafted, True))
    misses = wrong[np.searchsorted(wrong, first)] - first
    counts: Int32Array = np.minimum(misses + 1, widths).astype(np.int32)
    return counts


def read_device_tokens(dispatch: Dispatch, sampled: SampledTokens) -> DispatchResult:
    """Convert the device's result. Raises RuntimeError if it lacks log-probabilities that a row asked for."""
    logprobs: list[RowLogprobs] = []
    found = sampled.logprobs
    if found is None and dispatch.num_logprobs.max(initial=-1) >= 0:
        raise RuntimeError("the device returned no log-probabilities, but a row asked for them")
    if found is not None:
        for i, index in enumerate(np.arange(len(dispatch.rows)).repeat(sampled.counts).tolist()):
            width = int(dispatch.num_logprobs[index])
            if width >= 0 and sampled.token_ids[i] >= 0:
                best, values = found.best_ids[i, :width], found.best_values[i, :width]
                value = pack_logprobs(found.values[i], found.ranks[i], best, values)
                logprobs.append(RowLogprobs(int(dispatch.rows[index]), value))
    counts = sampled.counts if dispatch.num_drafts is not None else None
    return _make_result(dispatch, sampled.token_ids, counts, logprobs)


def _make_result(
    dispatch: Dispatch, tokens: Int32Array, counts: Int32Array | None, logprobs: list[RowLogprobs]
) -> DispatchResult:
    """Return the result, in which a token of -1, always the last of its row, becomes a fault."""
    accepted = None if counts is None else counts - 1
    if -1 not in tokens.tolist():
        return DispatchResult(tokens, counts, logprobs, [], accepted)
    failed = tokens < 0
    counts = np.ones(len(dispatch.rows), np.int32) if counts is None else counts.copy()
    owners = np.arange(len(counts)).repeat(counts)[failed]
    counts[owners] -= 1
    faults = [RowFault(int(row), NOT_FINITE, _NOT_FINITE) for row in dispatch.rows[owners]]
    return DispatchResult(tokens[~failed], counts, logprobs, faults, accepted)


def apply_guides(dispatch: Dispatch, chosen: DispatchResult, constraints: StepConstraints) -> DispatchResult:
    """Return the tokens that rows append under the constraints of their guides: none, forced ones, or the chosen ones.

    Drafts count as computed as long as they equal the forced tokens; the last forced token never counts.
    """
    if not (constraints.withheld or constraints.forced or constraints.faults):
        return chosen
    rows, right = dispatch.rows, chosen.each_accepted(len(dispatch.rows)).copy()
    counts = chosen.each(len(rows)).copy()
    pieces = np.split(chosen.token_ids, counts.cumsum()[:-1])
    silent = constraints.withheld | constraints.faults.keys()
    for i in silent:
        pieces[i], right[i] = pieces[i][:0], 0
    for i, forced in constraints.forced.items():
        if counts[i]:
            pieces[i] = np.array(forced, np.int32)
            right[i] = _num_equal(dispatch.drafts(i), forced[:-1])
    dropped = {int(rows[i]) for i in silent}
    faults = [
        RowFault(int(rows[i]), error.code, str(error), error.status, error.param)
        for i, error in constraints.faults.items()
    ]
    return chosen._replace(
        token_ids=np.concatenate(pieces, dtype=np.int32),
        counts=np.array([len(piece) for piece in pieces], np.int32),
        accepted=right if dispatch.num_drafts is not None else None,
        logprobs=[entry for entry in chosen.logprobs if entry.row not in dropped],
        faults=chosen.faults + faults,
    )


def _num_equal(drafts: Sequence[int], tokens: Sequence[int]) -> int:
    """Return how many drafts equal the first `tokens`."""
    pairs = enumerate(zip(drafts, tokens, strict=False))
    return next((i for i, (draft, token) in pairs if draft != token), min(len(drafts), len(tokens)))
