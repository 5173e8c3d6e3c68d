"""DeviceSampler: sample the tokens of dispatches on the device, and read them back later."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pypto_serving.backend.base import SampledTokens, SamplingInputs, StepInputs
from pypto_serving.backend.cuda.adjustments import DeviceAdjustments
from pypto_serving.backend.cuda.device import Card
from pypto_serving.kernels.cuda.logprobs import Results, find_logprobs
from pypto_serving.kernels.cuda.sampling import LIMIT, LOWEST_SCORE, Chosen, ChunkSums, Filters, RowParameters, choose
from pypto_serving.types.arrays import Float32Array, Int32Array
from pypto_serving.types.sampler import Logprobs
from pypto_serving.types.step import BackendLimits

EMPTY = np.empty(0, np.int32)


class _Slot(NamedTuple):
    """The pinned memory of one dispatch in flight."""

    parameters: Tensor
    results: Tensor


class _Held(NamedTuple):
    """What `read` needs to know of a dispatch, int32 [n]: see SamplingInputs, and TokenHistory for `num_copies`."""

    num_logprobs: Int32Array
    rows: Int32Array
    positions: Int32Array
    num_copies: Int32Array


class DeviceSampler:
    """Owns the memory of sampling, and what the device knows of its tokens. Call `submit` and `read` in one order.

    A row samples one token in each dispatch.
    """

    NOTHING: ClassVar = SampledTokens(counts=EMPTY, token_ids=EMPTY)
    last_tokens: Tensor
    """int32 [max_num_seqs]: the last token of each of the worker's rows; -1 if its logits were not finite."""

    def __init__(self, limits: BackendLimits, vocab_size: int, device: Card, num_slots: int) -> None:
        where, rows = device.torch_device, limits.max_num_seqs
        self._device, self._vocab, self._rows = device, vocab_size, rows
        self._chunks = ChunkSums.empty(rows, vocab_size, where)
        self._parameters = torch.zeros(RowParameters.num_bytes(rows), dtype=torch.uint8, device=where)
        self._given = RowParameters.over(self._parameters, rows)
        self.last_tokens = torch.full((rows,), -1, dtype=torch.int32, device=where)
        self._adjustments = DeviceAdjustments(limits, vocab_size, device, num_slots)
        self._results = torch.zeros(Results.num_bytes(rows), dtype=torch.uint8, device=where)
        self._out = Results.over(self._results, rows)
        self._chosen = Chosen(self._out.tokens, self.last_tokens, self._adjustments.history.tokens)
        self._slots = [
            _Slot(device.pinned(len(self._parameters)), device.pinned(len(self._results))) for _ in range(num_slots)
        ]
        self._held = [_Held(EMPTY, EMPTY, EMPTY, EMPTY)] * num_slots

    def submit(self, slot: int, logits: Tensor, inputs: StepInputs, sampling: SamplingInputs) -> None:
        """Queue the choice of a token for each sampling row. `logits` [>= n, vocab] float32 begin with theirs."""
        count, memory, given = len(sampling.owners), self._slots[slot], sampling.adjustments
        rows, history = inputs.rows[sampling.owners], self._adjustments.history
        parameters = RowParameters.over(memory.parameters, self._rows)
        filters = self._pack(parameters, rows, sampling)
        changed, masks = parameters.ints.numpy()[4:, :count]
        longest = 0 if given is None else self._adjustments.pack(slot, given, changed, masks)
        self._held[slot] = _Held(sampling.num_logprobs, rows, sampling.positions, history.num_copies[rows])
        if not count:
            return
        self._device.copy(self._parameters, memory.parameters)
        scores = logits if given is None else self._adjustments.adjust(logits, count, longest, self._given)
        choose(scores, count, self._given, filters, self._chunks, self._chosen)
        used = 4 * count
        if (width := int(sampling.num_logprobs.max())) >= 0:
            used = len(self._results)
            find_logprobs(logits, count, min(width, self._vocab), self._given, self._chunks, self._out)
        self._device.copy(memory.results[:used], self._results[:used])

    def launch_all(self, logits: Tensor) -> None:
        """Launch all kernels once, on the first row of `logits`, to compile them ahead. What they compute is void."""
        self._adjustments.adjust(logits, 1, 1, self._given)
        choose(logits, 1, self._given, Filters(True, True, True), self._chunks, self._chosen)
        find_logprobs(logits, 1, 1, self._given, self._chunks, self._out)

    def _pack(self, given: RowParameters, rows: Int32Array, sampling: SamplingInputs) -> Filters:
        """Write the parameters of the rows. Greedy ones have no filters."""
        count, draws = len(sampling.owners), sampling.draws
        doubles, floats, ints = (column.numpy()[:, :count] for column in given)
        random = draws["temperature"] > 0
        top_k = np.where(random, np.minimum(draws["top_k"], self._vocab), 0)
        top_p, min_p = (np.where(random, draws[name], off) for name, off in (("top_p", 1.0), ("min_p", 0.0)))
        ranked = (top_k > 0) | (top_p < 1)
        with np.errstate(divide="ignore"):
            floors = np.log(min_p).astype(np.float32)
        floors[(ranked | (min_p > 0)) & (floors < LOWEST_SCORE)] = LOWEST_SCORE
        doubles[:], floats[:] = (draws["random"], top_p), (draws["temperature"], floors)
        ints[:4] = top_k, rows, sampling.positions, sampling.num_logprobs
        searched = (top_k > LIMIT) | (ranked & (top_k == 0))
        return Filters(bool((floors > -np.inf).any()), bool(ranked.any()), bool(searched.any()))

    def read(self, slot: int) -> SampledTokens:
        """Return what the dispatch of `slot` sampled. The device must have finished it."""
        asked, rows, positions, num_copies = self._held[slot]
        found = Results.over(self._slots[slot].results, self._rows)
        tokens, *parts = (part[: len(asked)].numpy().copy() for part in found)
        self._adjustments.history.append(rows, positions, tokens, num_copies)
        width = min(int(asked.max(initial=-1)), self._vocab)
        logprobs = None if width < 0 else _join(tokens, asked, width, *parts)
        return SampledTokens(counts=np.ones(len(asked), np.int32), token_ids=tokens, logprobs=logprobs)


def _join(
    tokens: Int32Array,
    asked: Int32Array,
    width: int,
    ranks: Int32Array,
    sums: NDArray[np.float64],
    peaks: Float32Array,
    values: Float32Array,
    best_ids: Int32Array,
    best_values: Float32Array,
) -> Logprobs:
    """Make log-probabilities of the parts that the device found; zeros for rows that have none."""
    made, rows = Logprobs.empty(len(tokens), width), np.flatnonzero((asked >= 0) & (tokens >= 0))
    for array in (made.values, made.ranks, made.best_ids, made.best_values):
        array[:] = 0
    base = peaks[rows] + np.log(sums[rows])
    made.values[rows], made.ranks[rows] = values[rows] - base, ranks[rows]
    made.best_ids[rows], made.best_values[rows] = best_ids[rows, :width], best_values[rows, :width] - base[:, None]
    return made
