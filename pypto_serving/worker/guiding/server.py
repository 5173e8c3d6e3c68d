"""GuideServer: follow the outputs of rows, one token at a time, and answer with their next allowed tokens."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TypeVar

import numpy as np

from pypto_serving.errors import RequestError, RequestFailedError, UnavailableError
from pypto_serving.fair_queue import FairQueue
from pypto_serving.guidance import Compiler, GrammarError, Matcher, content_key
from pypto_serving.ipc import Channel
from pypto_serving.limits import CPU_S, MAX_MATCHER_BYTES, TOKEN_S, ProcessMemory
from pypto_serving.types.arrays import id_list, unpack_ids
from pypto_serving.types.guide import Grammar
from pypto_serving.types.sampler import MaskArray
from pypto_serving.util import format_size
from pypto_serving.worker.guiding.wire import (
    GuideAnswers,
    OpenRow,
    RowAhead,
    RowChoice,
    RowRefusal,
    RowTokens,
    SharedMasks,
    ToGuides,
)
from pypto_serving.worker.reasoning import TokenTexts
from pypto_serving.worker.row_guide import RowGuide

T = TypeVar("T")

WAIT_S = 10.0
"""Limit of a row's wait for memory, after which it is ended."""
ROW_BYTES = MAX_MATCHER_BYTES // 4
"""Limit of one row's memory. If a row took 1/8 of it, its memory is returned to the system at its end."""
ANSWER_S = 0.002
"""Interval of answers while rows are followed, and of checks while a grammar compiles."""
DECAY = 0.9
"""The recorded time of a row's slowest token decays by this factor with each later token."""
COMPILES_TOO_LONG = signal.SIGVTALRM
"""Signal that ends the process when a grammar takes too long to compile; SIGPROF, when a token takes too long."""
NO_ROW = 0, 0
HELD = f"other grammars take all memory for grammars, and none of them ended in {WAIT_S:g} s; try again later"
TOO_LARGE = f"the grammar takes more than {format_size(ROW_BYTES)} of memory to follow; simplify it"


@lru_cache(maxsize=1)
def load_compiler(model_dir: str, vocab_size: int, eos_ids: bytes) -> tuple[Compiler, TokenTexts]:
    """Prepare the tokenizer of a checkpoint for outputs that end with one of `eos_ids`. The last result is cached."""
    compiler = Compiler.of(model_dir, vocab_size, id_list(eos_ids))
    return compiler, TokenTexts(compiler.tokens)


@dataclass(eq=False)
class FollowedRow:
    """A row that a guide process follows.

    - `guide`: None until its grammar is compiled and its first choice is known.
    - `num_tokens`: number of tokens of the guide; `todo`: tokens that it must still append; `drafts`: to be checked
      after all of these.
    - `num_answered`: number of tokens when its last choice was sent.
    - `num_bytes`: memory that its guide took.
    - `token_s`: CPU time of its slowest recent token, with exponential decay.
    """

    source: OpenRow
    todo: deque[int]
    key: int
    since_s: float
    matcher: Matcher | None = None
    guide: RowGuide | None = None
    is_queued: bool = False
    num_tokens: int = 0
    drafts: tuple[int, ...] = ()
    num_answered: int = -1
    num_bytes: int = 0
    token_s: float = 0.0


class CompileThread:
    """Compiles grammars in a thread, one at a time. llguidance releases the GIL meanwhile.

    `row`: the row whose grammar is being compiled, or None; `outcome`: its matcher, when done.
    """

    def __init__(self) -> None:
        self.row: FollowedRow | None = None
        self.outcome: Future[Matcher] = Future()
        self._pool = ThreadPoolExecutor(1)
        self._clock, self._began_s = time.CLOCK_THREAD_CPUTIME_ID, math.inf

    def start(self, row: FollowedRow, grammar: Grammar, compiler: Compiler) -> None:
        """Compile the grammar of a row, and compute its first mask, which also takes long."""
        self.row, self._began_s = row, math.inf
        self.outcome = self._pool.submit(self._run, grammar, compiler)

    def _run(self, grammar: Grammar, compiler: Compiler) -> Matcher:
        self._clock, self._began_s = time.pthread_getcpuclockid(threading.get_ident()), time.thread_time()
        matcher = compiler.compile(grammar)
        matcher.fill(np.zeros(compiler.num_words, np.uint32))
        return matcher

    def used_s(self) -> float:
        """Return the CPU time used for the last grammar; below 0 if compiling has not begun."""
        return time.clock_gettime(self._clock) - self._began_s


class GuideServer:
    """Owns the guides of rows in a guide process. Each row has its own matchers, so rows do not affect each other.

    Turns: rows with tokens to follow share CPU time by weighted fair queueing. A token that takes more than TOKEN_S of
    CPU time ends the process. New grammars are compiled one at a time, in a thread; clients share its time in the same
    way. Rows wait at most TOKEN_S for a compilation, which ends the process if it takes more than CPU_S.

    Memory: while all matchers together take more than half of their limit, no grammar is compiled until rows leave; new
    rows wait for at most WAIT_S. A row that takes more than ROW_BYTES is ended. Above the limit of all, the largest row
    is ended. While a grammar compiles in parallel with other work, all growth counts as its own.
    """

    def __init__(
        self,
        channel: Channel[ToGuides],
        shared: SharedMasks,
        model_dir: str,
        vocab_size: int,
        memory: ProcessMemory,
        limit_cpu: Callable[[float], None],
    ) -> None:
        self._channel = channel
        self._shared = shared
        self._memory = memory
        self._limit_cpu = limit_cpu
        self._load = partial(load_compiler, model_dir, vocab_size)
        self._bits: MaskArray = np.zeros(0, np.uint32)
        self._rows: dict[int, FollowedRow] = {}
        self._turns = FairQueue[int, FollowedRow](lambda row: row.token_s)
        self._newcomers = FairQueue[str, FollowedRow]()
        self._compiling = CompileThread()
        self._owed_s = 0.0
        """Time that rows may still work before the next grammar compiles: as long as they waited for the last one."""
        self._resident_bytes = 0
        self._held_bytes = 0
        self._had_room_s = 0.0
        """Last time at which a new grammar did not have to wait for memory."""
        self._answers = GuideAnswers([], [], [])
        self._answered_s = self._worked_s = time.monotonic()

    @property
    def is_busy(self) -> bool:
        """Return whether any row has pending work."""
        return bool(self._turns or self._compiling.row or (self._newcomers and not self._is_full))

    @property
    def _is_full(self) -> bool:
        """Return whether new grammars must wait for memory."""
        return self._held_bytes > MAX_MATCHER_BYTES // 2

    def has_been_idle(self, seconds: float) -> bool:
        """Return whether there has been no row for `seconds`."""
        return not self._rows and time.monotonic() - self._worked_s >= seconds

    def turn(self, wait_s: float) -> None:
        """Process new messages, work for one row, and answer. Without work, wait at most `wait_s` for messages."""
        self._shared.num_heartbeats[0] += 1
        if self.is_busy:
            wait_s = 0.0 if self._turns or self._compiling.row is None else ANSWER_S
        message = self._channel.receive(min(wait_s, WAIT_S) if self._newcomers else wait_s)
        while message is not None:
            self._take(message)
            message = self._channel.receive()
        self._compile()
        if (row := self._turns.pop()) is not None:
            row.is_queued = False
            self._work(row)
        if not self._turns or time.monotonic() - self._answered_s > ANSWER_S:
            self._answer()

    def _take(self, message: ToGuides) -> None:
        self._worked_s = time.monotonic()
        if isinstance(message, RowTokens):
            token_ids, start = unpack_ids(message.token_ids).tolist(), 0
            for life, count in zip(message.lives, message.counts, strict=True):
                if (row := self._rows.get(life)) is not None:
                    self._add(row, token_ids[start : start + count], message.are_drafts)
                start += count
        elif isinstance(message, OpenRow):
            grammar, output = message.guide.grammar, deque(unpack_ids(message.output).tolist())
            key = 0 if grammar is None else content_key(grammar)
            row = self._rows[message.life] = FollowedRow(message, output, key, self._worked_s)
            if grammar is None:
                self._add_turn(row)
            else:
                self._newcomers.push(message.guide.client, row)
        elif (row := self._rows.get(message.life)) is not None:
            self._forget(row)

    def _add_turn(self, row: FollowedRow) -> None:
        """Give a row a turn if it has none."""
        if not row.is_queued:
            row.is_queued = True
            self._turns.push(row.source.life, row)

    def _add(self, row: FollowedRow, token_ids: list[int], are_drafts: bool) -> None:
        """Add tokens for a row to follow, which invalidate earlier drafts; or add new drafts."""
        if are_drafts:
            row.drafts = tuple(token_ids)
        else:
            row.todo.extend(token_ids)
            row.drafts = ()
        if row.guide is not None:
            self._add_turn(row)

    def _compile(self) -> None:
        """Compile the next grammar, or take the outcome of the last one. If one takes too long, end the process."""
        thread = self._compiling
        if not self._is_full:
            self._had_room_s = time.monotonic()
        if thread.row is None:
            if self._is_full:
                self._refuse_late()
            elif not (self._turns and self._owed_s > 0.0) and (row := self._newcomers.pop()) is not None:
                self._start_compiling(row)
        if thread.row is not None:
            if thread.outcome.done():
                self._end_compiling(thread.row, thread.outcome)
            elif thread.used_s() > CPU_S:
                signal.raise_signal(COMPILES_TOO_LONG)

    def _refuse_late(self) -> None:
        """End rows that have waited for memory for too long."""
        late_s = time.monotonic() - WAIT_S
        if self._had_room_s >= late_s:
            return
        for row in [each for each in self._rows.values() if each.guide is None and each.matcher is None]:
            if row.since_s < late_s:
                self._refuse(row, UnavailableError(HELD))

    def _start_compiling(self, row: FollowedRow) -> None:
        """Start to compile the grammar of a row; let other rows wait a little, since most grammars compile quickly."""
        grammar, (compiler, _) = row.source.guide.grammar, self._prepare(row)
        assert grammar is not None
        self._answer()
        started_s = time.monotonic()
        self._shared.at_work[1] = row.source.life, row.key
        self._compiling.start(row, grammar, compiler)
        wait([self._compiling.outcome], TOKEN_S)
        self._owed_s = time.monotonic() - started_s

    def _end_compiling(self, row: FollowedRow, outcome: Future[Matcher]) -> None:
        """Take the outcome of a compilation: the row has its first turn, or ends."""
        self._compiling.row = None
        self._newcomers.charge(row.source.guide.client, self._compiling.used_s())
        self._shared.at_work[1] = NO_ROW
        if row.source.life in self._rows:
            if (error := outcome.exception()) is not None:
                self._fail(row, error)
            else:
                row.matcher = outcome.result()
                self._add_turn(row)
        self._compiling.outcome = Future()
        self._measure(row)

    def _prepare(self, row: FollowedRow) -> tuple[Compiler, TokenTexts]:
        """Return compiler and texts for a new row. If loading them ends the process, no row is at fault."""
        compiler, texts = self._load(row.source.eos_ids)
        if len(self._bits) != compiler.num_words:
            self._bits = np.zeros(compiler.num_words, np.uint32)
            self._resident_bytes = self._memory.resident_bytes()
        return compiler, texts

    def _work(self, row: FollowedRow) -> None:
        """Follow one token of a row, or all its drafts; then answer, or give it another turn."""
        _, texts = self._prepare(row)
        self._shared.at_work[0] = row.source.life, row.key
        try:
            self._follow(row, texts)
        except BaseException as error:  # also a panic of llguidance: end the row with its matcher
            self._fail(row, error)
        else:
            self._answer_choice(row)
        self._shared.at_work[0] = NO_ROW
        if self._compiling.row is None:
            self._measure(row)

    def _follow(self, row: FollowedRow, texts: TokenTexts) -> None:
        if row.guide is None:
            source, eos_ids = row.source, id_list(row.source.eos_ids)
            guide = RowGuide(source.guide, eos_ids, row.matcher, self._bits, source.jumps, texts)
            self._within_limit(row, guide.open)
            row.guide, row.matcher = guide, None
        elif row.todo:
            row.num_tokens += 1
            self._within_limit(row, partial(row.guide.append, row.todo.popleft()))
        elif row.drafts:
            self._look_ahead(row, row.guide)

    def _look_ahead(self, row: FollowedRow, guide: RowGuide) -> None:
        """Write the masks after the drafts of a row, as far as they match, within the time limit of a token."""
        drafts, row.drafts = row.drafts, ()
        masks, found, started_s = self._shared.masks[row.source.row], 0, time.thread_time()
        counts = guide.look_ahead(drafts[: len(masks) - 1], masks)
        while (count := self._within_limit(row, partial(next, counts, None))) is not None:
            found = count
            if time.thread_time() - started_s > TOKEN_S:
                break
        self._answers.aheads.append(RowAhead(row.source.life, row.num_tokens, found))

    def _within_limit(self, row: FollowedRow, work: Callable[[], T]) -> T:
        """Do `work` for a token of a row and charge its CPU time. More than TOKEN_S ends the process."""
        started_s = time.thread_time()
        self._limit_cpu(TOKEN_S)
        try:
            return work()
        finally:
            self._limit_cpu(0.0)
            used_s = time.thread_time() - started_s
            self._owed_s -= used_s
            row.token_s = max(used_s, DECAY * row.token_s)
            self._turns.charge(row.source.life, used_s)

    def _answer_choice(self, row: FollowedRow) -> None:
        assert row.guide is not None
        if row.todo or row.drafts:
            self._add_turn(row)
        if row.todo or row.num_answered == row.num_tokens:
            return
        row.num_answered = row.num_tokens
        choice = row.guide.choice()
        if choice.mask is not None:
            mask = self._shared.masks[row.source.row, 0]
            mask[:] = choice.mask[: len(mask)]
        said = RowChoice(
            row.source.life,
            row.num_tokens,
            choice.forced,
            choice.mask is not None,
            choice.is_done,
            choice.expected,
        )
        self._answers.choices.append(said)

    def _fail(self, row: FollowedRow, error: BaseException) -> None:
        """End a row because of an error in its work."""
        if isinstance(error, MemoryError):
            error = GrammarError(TOO_LARGE)
        elif not isinstance(error, RequestError):
            error = RequestFailedError(f"the grammar could not be followed: {str(error)[:200]}")
        self._refuse(row, error)

    def _refuse(self, row: FollowedRow, error: RequestError) -> None:
        refusal = RowRefusal(row.source.life, error.status, error.code, str(error))
        self._answers.refusals.append(refusal)
        self._forget(row)

    def _forget(self, row: FollowedRow) -> None:
        """Drop a row, its pending work, and its matcher's memory."""
        row.guide = row.matcher = None
        self._rows.pop(row.source.life, None)
        self._turns.remove(row.source.life, row)
        self._newcomers.remove(row.source.guide.client, row)
        self._held_bytes -= row.num_bytes
        if row.num_bytes > ROW_BYTES // 8:
            self._memory.trim()
            self._resident_bytes = self._memory.resident_bytes()

    def _measure(self, row: FollowedRow) -> None:
        """Count the memory that a row took. End the row if that is too much, or the largest row if memory is short."""
        resident_bytes = self._memory.resident_bytes()
        grown_bytes = max(0, resident_bytes - self._resident_bytes)
        self._resident_bytes = resident_bytes
        if row.source.life not in self._rows:
            return
        row.num_bytes += grown_bytes
        self._held_bytes += grown_bytes
        if row.num_bytes > ROW_BYTES:
            self._refuse(row, GrammarError(TOO_LARGE))
        elif self._held_bytes > MAX_MATCHER_BYTES:
            largest = max(self._rows.values(), key=lambda each: (each.num_bytes, each.source.life))
            self._refuse(largest, UnavailableError(HELD))

    def _answer(self) -> None:
        """Send all news since the last answer."""
        if self._answers.choices or self._answers.refusals or self._answers.aheads:
            self._channel.send(self._answers)
            self._answers = GuideAnswers([], [], [])
        self._answered_s = time.monotonic()
