"""The worker's side of the guide process: its start and end, and the rows that it follows."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import NamedTuple

import msgspec
import numpy as np

from pypto_serving.errors import EXIT_OK, RequestError, RequestFailedError
from pypto_serving.guidance import GrammarError, KnownGrammars, content_key
from pypto_serving.ipc import SocketChannel
from pypto_serving.limits import STUCK_S
from pypto_serving.processes import COPY_END, COPY_NUMBER, Child, start_module
from pypto_serving.types.arrays import Int32Array, pack_ids
from pypto_serving.types.sampler import MaskArray
from pypto_serving.types.sampling import RowSampling
from pypto_serving.util import Backoff
from pypto_serving.worker.guiding.server import COMPILES_TOO_LONG
from pypto_serving.worker.guiding.wire import DropRow, GuideAnswers, GuideStart, OpenRow, RowTokens, SharedMasks
from pypto_serving.worker.row_guide import NextTokens

logger = logging.getLogger("pypto_serving.worker")

MAX_CRASHES = 6
"""Limit of consecutive processes that end for one row, or for no row, for reasons that a grammar cannot cause."""
OWN_FAULTS: dict[int, str] = {
    signal.SIGPROF: "takes too long to follow: one token took more CPU time than is allowed",
    COMPILES_TOO_LONG: "takes too long to compile",
    signal.SIGABRT: "takes too much memory to follow, or nests too deeply",
    signal.SIGSEGV: "nests too deeply to be followed",
}
"""Signals that are the fault of the row for which a process works, and their meaning."""
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Environment that keeps libraries from starting threads in the process, which forks."""
NOTHING: MaskArray = np.empty((0, 0), np.uint32)
"""No masks after drafts."""
CPUS = tuple(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ()
"""The worker's CPUs, read at import, before a backend pins the main thread."""


class GuidedRow:
    """A row with a guide, and the guide's last answer. Owned by RowGuides.

    - `life`: the row's id in messages to the process that follows it; 0 if none does yet.
    - `choice`: the next tokens that the row may append; None until the process answers.
    - `ahead` [n, words]: the masks after the first n of its drafts; None until the process answers.
    - `expected`: tokens that must follow the last one, as far as known from earlier answers.
    - `fault`: the error that ends the row, or None.
    - `num_crashes`: number of processes that ended while they worked for the row.
    """

    def __init__(self, row: int, sampling: RowSampling, output: Sequence[int]) -> None:
        assert sampling.guide is not None
        self.life = 0
        self.row = row
        self.guide = sampling.guide
        self.eos_ids = sampling.eos_ids
        self.jumps = sampling.num_logprobs < 0
        self.output = list(output)
        self.choice: NextTokens | None = None
        self.ahead: MaskArray | None = NOTHING
        self.expected: tuple[int, ...] = ()
        self.fault: RequestError | None = None
        self.num_crashes = 0

    @property
    def is_busy(self) -> bool:
        return (self.choice is None or self.ahead is None) and self.fault is None

    def append(self, token_ids: Sequence[int]) -> None:
        """Record tokens that the row appended. Until the next answer, only remaining expected tokens are known."""
        expected, count = () if self.choice is None else self.choice.expected, len(token_ids)
        self.expected = expected[count:] if expected[:count] == tuple(token_ids) else ()
        self.choice, self.ahead = None, NOTHING
        self.output += token_ids

    def fail(self, error: RequestError) -> None:
        """Fail the row. If its grammar is the reason, name the request's field with the grammar."""
        self.fault = error
        if error.status < HTTPStatus.INTERNAL_SERVER_ERROR and self.guide.grammar is not None:
            field = self.guide.field
            self.fault = RequestError(f"{field}: {error}", param=field, code=error.code, status=error.status)


class Death(NamedTuple):
    """The end of a process: its `signal` or 0, and the row for which it worked: its life and grammar's key, or 0."""

    life: int
    key: int
    signal: int


class GuideProcess:
    """Owns the guide process, the channel to its copy that follows rows, and the shared masks.

    Process and copy start with the first row, and end after a long time without rows. After a death all rows are
    forgotten, and the next row starts another copy, with growing delays if copies end without a row at fault.
    """

    def __init__(self, model_dir: str, vocab_size: int, max_rows: int, max_drafts: int = 0) -> None:
        self._memory = os.memfd_create("pypto-masks")
        os.ftruncate(self._memory, SharedMasks.num_bytes(max_rows, vocab_size, max_drafts))
        self.shared = SharedMasks(self._memory, max_rows, vocab_size, max_drafts)
        self._start = GuideStart(-1, self._memory, model_dir, vocab_size, max_rows, CPUS, max_drafts)
        self._child: Child | None = None
        self._control: socket.socket | None = None
        self._channel: SocketChannel[GuideAnswers] | None = None
        self._unsent: list[msgspec.Struct] = []
        self._backoff = Backoff(0.1, 5.0)
        self._num_heartbeats = 0
        self._heard_s = 0.0

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    def send(self, message: msgspec.Struct) -> None:
        """Send a message, or keep it until a copy may start; never wait."""
        if self._channel is not None or self._unsent or isinstance(message, OpenRow):
            self._unsent.append(message)
        self._flush()

    def _flush(self) -> None:
        if self._channel is None and self._unsent and self._backoff.is_over(time.monotonic()):
            first = self._unsent[0]
            assert isinstance(first, OpenRow)
            self._channel = self._start_copy(first.eos_ids)
        if self._channel is not None:
            for message in self._unsent:
                self._channel.send(message)
            self._unsent.clear()

    def _start_copy(self, eos_ids: bytes) -> SocketChannel[GuideAnswers]:
        """Start a copy, and the process if there is none. If this fails, the returned channel is closed."""
        channel, theirs = SocketChannel.pair(GuideAnswers)
        self._heard_s = time.monotonic()
        with theirs, suppress(OSError):
            if self._control is None:
                self._start_process()
            assert self._control is not None
            socket.send_fds(self._control, [COPY_NUMBER.pack(0), eos_ids], [theirs.fileno()])
        return channel

    def _start_process(self) -> None:
        ours, end = socket.socketpair(type=socket.SOCK_SEQPACKET)
        start = msgspec.structs.replace(self._start, control=end.fileno())
        try:
            self._child = start_module(
                "pypto_serving.worker.guiding", start, end, shared=(self._memory,), variables=ONE_THREAD
            )
        except OSError as error:
            ours.close()
            logger.error("the process that follows grammars cannot be started: %s", error)
            raise
        ours.settimeout(1.0)
        self._control = ours

    def receive(self, timeout_s: float) -> GuideAnswers | None:
        """Return the next answers of the process, or None if there are none in time.

        Wait also while no copy runs, so that the caller does not compute in vain until the next one starts.
        """
        self._flush()
        if self._channel is None:
            time.sleep(timeout_s)
            return None
        answers = self._channel.receive(timeout_s)
        if answers is not None:
            self._backoff.succeed()
        return answers

    def death(self) -> Death | None:
        """Return the process's death, once, or None. End a process that has been silent for too long."""
        if self._channel is None or not (self._channel.gone or self._is_stuck()):
            return None
        code = self._end_code() if self._channel.gone else None
        ended = code or self._end()
        (life, key), compiled = self.shared.at_work.tolist()
        if compiled[0] and (not life or code != -signal.SIGPROF):
            life, key = compiled
        self._channel.close()
        self._channel = None
        self.shared.at_work[:] = 0
        if not life and code != EXIT_OK:
            logger.error("a process that follows grammars ended with code %d", ended)
            self._backoff.fail(time.monotonic())
        return Death(life, key, max(0, -(code or 0)))

    def _is_stuck(self) -> bool:
        """Return whether the process has been silent for too long."""
        now_s, num_heartbeats = time.monotonic(), int(self.shared.num_heartbeats[0])
        if num_heartbeats != self._num_heartbeats:
            self._num_heartbeats, self._heard_s = num_heartbeats, now_s
        return now_s - self._heard_s > STUCK_S

    def _end_code(self) -> int | None:
        """Return the exit code of the copy; None if the whole process ended."""
        end = b""
        if self._control is not None:
            with suppress(OSError):
                end = self._control.recv(COPY_END.size)
        return int(COPY_END.unpack(end)[1]) if end else None

    def _end(self) -> int:
        """End the process and its copy; return its exit code."""
        if self._control is not None:
            self._control.close()
            self._control = None
        child, self._child = self._child, None
        return EXIT_OK if child is None else child.end(0.0)

    def close(self) -> None:
        """End the process for good."""
        self._end()
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        os.close(self._memory)


MakeGuideProcess = Callable[[str, int, int, int], GuideProcess]
"""Makes a guide process of a checkpoint's folder, a vocabulary size, and numbers of rows and drafts of each."""


class GuideClient:
    """Owns the guide process and knows the rows that it follows, by their lives. Owned by RowGuides.

    The answers of a process depend only on a row's guide and tokens. So when it dies, another process follows the same
    rows from their first token on. A grammar that ended a process is refused from then on.
    """

    def __init__(self, process: GuideProcess) -> None:
        self.process = process
        self.rows: dict[int, GuidedRow] = {}
        self._refused = KnownGrammars[RequestError]()
        self._lives = itertools.count(1)
        self._num_mute = 0
        self._appended: list[tuple[int, Int32Array]] = []
        self._drafted: list[tuple[int, Int32Array]] = []

    def open(self, guided: GuidedRow) -> None:
        """Follow a row from its first token on, unless its grammar is known to end processes."""
        grammar = guided.guide.grammar
        if grammar is not None and (error := self._refused.find(content_key(grammar))) is not None:
            guided.fail(error)
            return
        guided.choice, guided.ahead, guided.life = None, NOTHING, next(self._lives)
        self.rows[guided.life] = guided
        opened = OpenRow(guided.life, guided.row, guided.guide, guided.eos_ids, guided.jumps, pack_ids(guided.output))
        self.process.send(opened)

    def drop(self, guided: GuidedRow) -> None:
        """Stop following a row, and drop its pending work."""
        if self.rows.pop(guided.life, None) is not None:
            self.process.send(DropRow(guided.life))

    def append(self, guided: GuidedRow, token_ids: Int32Array) -> None:
        """Queue tokens that a row appended for the next `flush`."""
        if guided.life in self.rows:
            self._appended.append((guided.life, token_ids))

    def draft(self, guided: GuidedRow, token_ids: Int32Array) -> None:
        """Queue drafts of a row for the next `flush`, to ask which tokens are allowed after each."""
        if guided.life in self.rows:
            guided.ahead = None
            self._drafted.append((guided.life, token_ids))

    def flush(self) -> None:
        """Send queued tokens and drafts to the process."""
        for pieces, are_drafts in ((self._appended, False), (self._drafted, True)):
            if pieces:
                lives, tokens = zip(*pieces, strict=True)
                joined = np.concatenate(tokens, dtype=np.int32).tobytes()
                self.process.send(RowTokens(list(lives), [len(each) for each in tokens], joined, are_drafts))
                pieces.clear()

    def receive(self, timeout_s: float) -> bool:
        """Process new answers; return False if there are none. If the process died, start another."""
        if not self.rows:
            return False
        answers = self.process.receive(timeout_s)
        if answers is None:
            if (death := self.process.death()) is not None:
                self._recover(death)
            return False
        self._num_mute = 0
        while answers is not None:
            self._take(answers)
            answers = self.process.receive(0.0)
        return True

    def _take(self, answers: GuideAnswers) -> None:
        masks = self.process.shared.masks
        for choice in answers.choices:
            guided = self.rows.get(choice.life)
            if guided is not None and choice.num_tokens == len(guided.output):
                mask = masks[guided.row, 0] if choice.is_masked else None
                guided.choice = NextTokens(choice.forced, mask, choice.is_done, choice.expected)
        for ahead in answers.aheads:
            guided = self.rows.get(ahead.life)
            if guided is not None and guided.ahead is None and ahead.num_tokens == len(guided.output):
                guided.ahead = masks[guided.row, 1 : 1 + ahead.num_drafts]
        for refusal in answers.refusals:
            if (guided := self.rows.pop(refusal.life, None)) is not None:
                guided.fail(RequestError(refusal.message, code=refusal.code, status=refusal.status))

    def _recover(self, death: Death) -> None:
        """Fail the row that ended the process, if it is still there, and let another process follow the others."""
        if death.key and (words := OWN_FAULTS.get(death.signal)) is not None:
            error = GrammarError(f"the grammar {words}; simplify it, or make it less ambiguous")
            self._refused.add(death.key, error)
        elif (guilty := self.rows.get(death.life)) is not None:
            guilty.num_crashes += 1
            if guilty.num_crashes == MAX_CRASHES:
                del self.rows[death.life]
                guilty.fail(RequestFailedError(f"{MAX_CRASHES} processes ended while they followed its grammar"))
        rows, self.rows = sorted(self.rows.values(), key=lambda each: each.num_crashes), {}
        self._num_mute += not death.life
        for guided in rows:
            if self._num_mute < MAX_CRASHES:
                self.open(guided)
            else:
                guided.fail(RequestFailedError("the process that follows grammars keeps ending; see the log"))
        self._num_mute %= MAX_CRASHES
