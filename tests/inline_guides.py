"""A guide process that is none: it follows grammars in the thread that asks, without limits."""

from __future__ import annotations

import time
from collections import deque

import msgspec

from pypto_serving.limits import ProcessMemory
from pypto_serving.worker.guide_client import Death, GuideProcess
from pypto_serving.worker.guiding.server import GuideServer
from pypto_serving.worker.guiding.wire import GuideAnswers, SharedMasks, ToGuides
from tests.memory_channel import MemoryChannel


class FixedMemory(ProcessMemory):
    """Measures `num_bytes`."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def resident_bytes(self) -> int:
        return self.num_bytes

    def trim(self) -> None:
        pass


class InlineGuideProcess(GuideProcess):
    """The same over a channel in memory.

    - `receive` works for one row, or, if it may wait, until there is an answer.
    - `deaths` are still to come.
    - While it `is_stuck`, it answers nothing.
    """

    def __init__(self, model_dir: str, vocab_size: int, max_rows: int, max_drafts: int = 0) -> None:
        self._start = model_dir, vocab_size
        self.shared = SharedMasks(-1, max_rows, vocab_size, max_drafts)
        self.deaths: deque[Death] = deque()
        self.is_stuck = False
        self.memory = FixedMemory()
        self._renew()

    def _renew(self) -> None:
        self._ours, theirs = MemoryChannel.pair(GuideAnswers, ToGuides)
        self.server = GuideServer(theirs, self.shared, *self._start, self.memory, lambda seconds: None)

    def send(self, message: msgspec.Struct) -> None:
        self._ours.send(message)

    def receive(self, timeout_s: float) -> GuideAnswers | None:
        if self.deaths or self.is_stuck:
            return None
        until_s = time.monotonic() + timeout_s
        while True:
            self.server.turn(0.0)
            answers = self._ours.receive()
            if answers is not None or not timeout_s or not self.server.is_busy:
                return answers
            if self.server._compiling.row is not None and time.monotonic() > until_s:
                return None

    def death(self) -> Death | None:
        if not self.deaths:
            return None
        self._renew()
        return self.deaths.popleft()

    def close(self) -> None:
        self._ours.close()
