"""DeviceSampler: sample the tokens of dispatches on the device, and read them back later."""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pypto_serving.backend.base import SampledTokens, SamplingInputs, StepInputs
from pypto_serving.kernels.cuda.logprobs import Results, find_logprobs
from pypto_serving.kernels.cuda.sampling import LIMIT, LOWEST_SCORE, Chosen, ChunkSums, Filters, RowParameters, choose
from pypto_serving.types.arrays import Float32Array, Int32Array
from pypto_serving.types.sampler import Logprobs
from pypto_serving.types.step import BackendLimits

EMPTY = np.empty(0, np.int32)


class Device(Protocol):
    """What a sampler needs of a device."""

    torch_device: torch.device

    def pinned(self, num_bytes: int) -> Tensor:
        """Allocate host memory that the device copies from and to by itself, uint8 [num_bytes]."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy between the device and pinned memory, after all work before it. Returns at once."""


class _Slot(NamedTuple):
    """The pinned memory of one dispatch in flight."""

    parameters: Tensor
    results: Tensor


class DeviceSampler:
    """Owns the memory of sampling, and what the device knows of its tokens. Call `submit` and `read` in one order.

    A row samples one token in each dispatch.
    """

    NOTHING: ClassVar = SampledTokens(counts=EMPTY, token_ids=EMPTY)
    last_tokens: Tensor
    """int32 [max_num_seqs]: the last token of each of the worker's rows; -1 if its logits were not finite."""

    def __init__(self, limits: BackendLimits, vocab_size: int, device: Device, num_slots: int) -> None:
        where, rows = device.torch_device, limits.max_num_seqs
        self._device, self._vocab, self._rows = device, vocab_size, rows
        self._chunks = ChunkSums.empty(rows, vocab_size, where)
        self._parameters = torch.zeros(RowParameters.num_bytes(rows), dtype=torch.uint8, device=where)
        self._given = RowParameters.over(self._parameters, rows)
        self.last_tokens = torch.full((rows,), -1, dtype=torch.int32, device=where)
        history = torch.full((rows, limits.max_model_len), -1, dtype=torch.int32, device=where)
        self._results = torch.zeros(Results.num_bytes(rows), dtype=torch.uint8, device=where)
        self._out = Results.over(self._results, rows)
        self._chosen = Chosen(self._out.tokens, self.last_tokens, history)
        self._slots = [
            _Slot(device.pinned(len(self._parameters)), device.pinned(len(self._results))) for _ in range(num_slots)
        ]
        self._asked = [EMPTY] * num_slots

    def submit(self, slot: int, logits: Tensor, inputs: StepInputs, sampling: SamplingInputs) -> None:
        """Queue the choice of a token for each sampling row. `logits` [>= n, vocab] float32 begin with theirs."""
        count, memory = len(sampling.owners), self._slots[slot]
        self._asked[slot] = sampling.num_logprobs
        if not count:
            return
        filters = self._pack(RowParameters.over(memory.parameters, self._rows), inputs, sampling)
        self._device.copy(self._parameters, memory.parameters)
        choose(logits, count, self._given, filters, self._chunks, self._chosen)
        used = 4 * count
        if (width := int(sampling.num_logprobs.max())) >= 0:
            used = len(self._results)
            find_logprobs(logits, count, min(width, self._vocab), self._given, self._chunks, self._out)
        self._device.copy(memory.results[:used], self._results[:used])

    def _pack(self, given: RowParameters, inputs: StepInputs, sampling: SamplingInputs) -> Filters:
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
        ints[:] = top_k, inputs.rows[sampling.owners], sampling.positions, sampling.num_logprobs
        searched = (top_k > LIMIT) | (ranked & (top_k == 0))
        return Filters(bool((floors > -np.inf).any()), bool(ranked.any()), bool(searched.any()))

    def read(self, slot: int) -> SampledTokens:
        """Return what the dispatch of `slot` sampled. The device must have finished it."""
        asked = self._asked[slot]
        found = Results.over(self._slots[slot].results, self._rows)
        tokens, *parts = (part[: len(asked)].numpy().copy() for part in found)
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
