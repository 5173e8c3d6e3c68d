"""GuideProcess: a process that follows grammars, seen from the worker."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from pypto_serving.ipc import SocketChannel
from pypto_serving.processes import Child, start_module
from pypto_serving.worker.guiding.wire import GuideAnswers, GuideStart, SharedMasks

logger = logging.getLogger("pypto_serving.worker")

FIRST_WAIT_S, MAX_WAIT_S = 0.05, 5.0
"""Waits between processes that end without an answer. They double."""
STUCK_S = 60.0
"""How long a process may be silent. CPU time has limits of its own."""
CPUS = tuple(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ()
"""The CPUs of the worker when it imports this module, before a backend pins its main thread."""


class Death(NamedTuple):
    """How a process ended.

    - `life`: of the row that it worked for, 0 for none.
    - `signal`: that ended it, 0 for none.
    - `num_mute`: how many processes, this one included, ended one after the other for no row and without an answer.
    """

    life: int
    signal: int
    num_mute: int


class GuideProcess:
    """Owns a guide process, its channel and the shared masks.

    It is started with the first message. After a death it has forgotten all rows, and the next message starts another,
    later and later while they end for no row and without an answer.
    """

    def __init__(self, model_dir: str, vocab_size: int, max_rows: int, max_drafts: int = 0) -> None:
        self._memory = os.memfd_create("pypto-masks")
        os.ftruncate(self._memory, SharedMasks.num_bytes(max_rows, vocab_size, max_drafts))
        self.shared = SharedMasks(self._memory, max_rows, vocab_size, max_drafts)
        self._start = GuideStart(-1, self._memory, model_dir, vocab_size, max_rows, CPUS, max_drafts)
        self._child: Child | None = None
        self._channel: SocketChannel[GuideAnswers] | None = None
        self._unsent: list[msgspec.Struct] = []
        self._num_mute = 0
        self._restart_s = 0.0
        self._num_heartbeats = 0
        self._heard_s = 0.0

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    def send(self, message: msgspec.Struct) -> None:
        """Send a message to the process; never wait."""
        self._unsent.append(message)
        self._flush()

    def _flush(self) -> None:
        if self._channel is None and time.monotonic() >= self._restart_s:
            self._channel = self._launch()
        if self._channel is not None:
            unsent, self._unsent = self._unsent, []
            for message in unsent:
                self._channel.send(message)

    def _launch(self) -> SocketChannel[GuideAnswers]:
        channel, theirs = SocketChannel.pair(GuideAnswers)
        self._heard_s = time.monotonic()
        start = msgspec.structs.replace(self._start, channel=theirs.fileno())
        try:
            self._child = start_module("pypto_serving.worker.guiding", start, theirs, shared=(self._memory,))
        except OSError as error:
            logger.error("a process that follows grammars cannot be started: %s", error)
        return channel

    def receive(self, timeout_s: float) -> GuideAnswers | None:
        """Return the next answers of the process, or None if none come in time.

        Between processes it waits as well, so that the caller does not compute in vain until the next one starts.
        """
        if self._unsent:
            self._flush()
        if self._channel is None:
            time.sleep(max(0.0, min(timeout_s, self._restart_s - time.monotonic())))
            return None
        answers = self._channel.receive(timeout_s)
        if answers is not None:
            self._num_mute = 0
        return answers

    def death(self) -> Death | None:
        """Return how the process ended, once, if it did. One that is silent for too long is ended."""
        if self._channel is None or not (self._child is None or self._channel.gone or self._is_stuck()):
            return None
        life = int(self.shared.at_work[0])
        code = self._end()
        if life == 0:
            logger.error("a process that follows grammars ended with code %d", code)
            self._restart_s = time.monotonic() + min(MAX_WAIT_S, FIRST_WAIT_S * 2**self._num_mute)
            self._num_mute += 1
        return Death(life, max(0, -code), self._num_mute)

    def _is_stuck(self) -> bool:
        """Return whether the process has been silent for too long."""
        now_s, num_heartbeats = time.monotonic(), int(self.shared.num_heartbeats[0])
        if num_heartbeats != self._num_heartbeats:
            self._num_heartbeats, self._heard_s = num_heartbeats, now_s
        return now_s - self._heard_s > STUCK_S

    def _end(self) -> int:
        """End the process; return its exit code."""
        child, self._child = self._child, None
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        code = 0 if child is None else child.end(0.0)
        self.shared.at_work[0] = 0
        self._unsent.clear()
        return code

    def close(self) -> None:
        """End the process for good."""
        self._end()
        os.close(self._memory)


MakeGuideProcess = Callable[[str, int, int, int], GuideProcess]
"""Makes a guide process of a checkpoint's folder, a vocabulary size, and numbers of rows and drafts of each."""
