"""A sampler on a device that its tests control, where work waits, and what its choices must be."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

import tests.kernels.cuda.interpreter  # noqa: F401
from pypto_serving.backend.base import SampledTokens, SamplingInputs, StepInputs
from pypto_serving.backend.cuda.sampler import DeviceSampler
from pypto_serving.backend.numpy_sampler import PlainSampler
from pypto_serving.kernels.cuda.launch import Call, recording, run
from pypto_serving.types.sampler import LogitAdjustments
from pypto_serving.types.step import BackendLimits
from tests.kernels.cuda.devices import DEVICE
from tests.kernels.drawing import follows

EMPTY = np.empty(0, np.int32)


class QueuedDevice:
    """Copies and launches made within `queueing` wait for `finish`. Implements what a DeviceSampler needs of Device."""

    torch_device = DEVICE

    def __init__(self) -> None:
        self._calls = deque[Call]()

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 0xFF, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor) -> None:
        assert target.shape == source.shape and target.dtype == source.dtype
        run(lambda: target.copy_(source))

    def queueing(self) -> AbstractContextManager[None]:
        return recording(self._calls.append)

    def finish(self) -> None:
        while self._calls:
            self._calls.popleft()()


class SamplerUnderTest:
    """A sampler of `rows` worker rows. Dispatches give the i-th of their sampling rows the worker's `workers[i]`."""

    def __init__(self, rows: int, vocab: int, slots: int = 2, max_model_len: int = 64) -> None:
        self.device = QueuedDevice()
        limits = BackendLimits(max_num_seqs=rows, max_model_len=max_model_len)
        self.sampler = DeviceSampler(limits, vocab, self.device, slots)

    def submit(
        self,
        slot: int,
        logits: np.ndarray,
        chances: np.ndarray,
        workers: Sequence[int] | None = None,
        positions: Sequence[int] | None = None,
        num_logprobs: Sequence[int] | None = None,
        adjustments: LogitAdjustments | None = None,
    ) -> None:
        count = len(chances)
        own = np.arange(count, dtype=np.int32) if workers is None else np.array(workers, np.int32)
        # A row that does not sample comes first.
        inputs = StepInputs(
            token_ids=EMPTY,
            positions=EMPTY,
            query_start=EMPTY,
            context_lens=EMPTY,
            logits_rows=EMPTY,
            slot_mapping=(),
            block_tables=(),
            fresh_blocks=(),
            rows=np.concatenate([[np.int32(99)], own]),
        )
        given = SamplingInputs(
            owners=np.arange(1, count + 1, dtype=np.int32),
            draws=chances,
            seeds=np.zeros(count, np.uint64),
            choices=np.zeros(count, np.uint64),
            positions=np.full(count, 5, np.int32) if positions is None else np.array(positions, np.int32),
            num_logprobs=np.full(count, -1, np.int32) if num_logprobs is None else np.array(num_logprobs, np.int32),
            adjustments=adjustments,
        )
        self.sampler.submit(slot, torch.from_numpy(logits).to(DEVICE), inputs, given)

    def sample(self, logits: np.ndarray, chances: np.ndarray, **values: object) -> SampledTokens:
        self.submit(0, logits, chances, **values)
        return self.sampler.read(0)

    def choose(self, logits: np.ndarray, chances: np.ndarray, **values: object) -> list[int]:
        return self.sample(logits, chances, **values).token_ids.tolist()


def check_choices(logits: np.ndarray, chances: np.ndarray, tokens: Sequence[int]) -> None:
    """Require the tokens of PlainSampler, but for random numbers near the boundary between two tokens."""
    expected = PlainSampler().choose(logits, chances)
    for i in np.flatnonzero(expected != tokens):
        assert expected[i] >= 0 and chances["temperature"][i] > 0, (i, expected[i], tokens[i])
        assert follows(logits[i], chances[i], int(tokens[i]), 1e-6, 1e-6), (chances[i], expected[i], tokens[i])


SETTINGS: tuple[dict[str, float], ...] = (
    {"temperature": 0},
    {},
    {"temperature": 0.6},
    {"temperature": 1e-30},
    {"temperature": 100},
    {"temperature": 0, "top_k": 20, "top_p": 0.9, "min_p": 0.1},
    {"temperature": 0.7, "min_p": 0.05},
    {"min_p": 1},
    {"top_k": 1},
    {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
    {"top_k": 50_000},
    {"top_k": 300, "top_p": 0.97, "temperature": 3},
    {"top_k": 3, "min_p": 0.01},
    {"top_k": 2**31 - 1, "top_p": 0.9},
    {"top_p": 1e-9},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 2},
    {"top_p": 0.999_999, "min_p": 1e-4},
    {"temperature": 1e-30, "top_p": 0.5},
    {"temperature": 100, "top_p": 0.99},
)
