"""A device of the CPU that is as late as a card may be: its work is done when somebody waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

import tests.kernels.cuda.interpreter  # noqa: F401
from pypto_serving.backend.cuda.device import CardEvent
from pypto_serving.kernels.cuda.launch import Call, recording, run


class FakeDevice:
    """Keeps launches, copies and graphs in a queue until an event is awaited. Implements Card.

    So buffers that are written too early, or read before they are written, change the answer. While it is open, all
    calls of this process go to the queue.
    """

    torch_device = torch.device("cpu")
    name = "fake"

    def __init__(self) -> None:
        self.queue: deque[Call] = deque()
        self.num_graphs = 0

    @contextmanager
    def opened(self) -> Iterator[FakeDevice]:
        with recording(self.queue.append):
            yield self

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 0x7F, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor) -> None:
        assert target.shape == source.shape
        run(lambda: target.copy_(source))

    def capture(self, work: Callable[[], None]) -> Call:
        calls: list[Call] = []
        with recording(calls.append):
            work()
        self.num_graphs += 1
        return lambda: [call() for call in calls]

    def record(self) -> CardEvent:
        marker = _Marker(self)
        self.queue.append(marker)
        return marker

    def exchange(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        for target, source in pairs:
            target.copy_(source)


class _Marker:
    """An event: the place in the queue behind all work before it."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device

    def __call__(self) -> None:
        """Reached; nothing is left to do."""

    def synchronize(self) -> None:
        while self in self._device.queue:
            self._device.queue.popleft()()
