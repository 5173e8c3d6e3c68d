"""A device that the sampler's tests control: work waits until it is told to run."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager

import torch
from torch import Tensor

import tests.kernels.cuda.interpreter  # noqa: F401
from pypto_serving.kernels.cuda.launch import Call, recording, run
from tests.kernels.cuda.devices import DEVICE


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
