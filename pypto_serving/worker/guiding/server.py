"""GuideServer: follow the outputs of rows, one token at a time, and answer what each may append next."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial

import numpy as np

from pypto_serving.errors import RequestError, RequestFailedError, UnavailableError
from pypto_serving.fair_queue import FairQueue
from pypto_serving.guidance import Compiler, GrammarError
from pypto_serving.ipc import Channel
from pypto_serving.limits import ProcessMemory, limit_cpu
from pypto_serving.types.arrays import id_list, unpack_ids
from pypto_serving.types.guide import MAX_MATCHER_BYTES, Guide
from pypto_serving.types.sampler import MaskArray
from pypto_serving.util import format_size
from pypto_serving.worker.guiding.followed_row import FollowedRow, GrammarCost
from pypto_serving.worker.guiding.wire import (
    AppendTokens,
    DraftTokens,
    GuideAnswers,
    OpenRow,
    RowAhead,
    RowChoice,
    RowRefusal,
    SharedMasks,
    ToGuides,
)
from pypto_serving.worker.reasoning import TokenTexts
from pypto_serving.worker.row_guide import RowGuide

OPEN_S, TOKEN_S = 4.0, 1.0
"""CPU time to compile a grammar with its first mask, and to follow a token. More of it ends the process.

The API's reader compiles within 2 s, without the tokenizer.
"""
ROW_S, ROW_TOKEN_S = 3.0, 0.01
"""CPU time that a row may take in all to follow its output, and more of it for each of its tokens."""
WAIT_S = 10.0
"""How long a row waits for memory before it ends."""
ROW_BYTES = MAX_MATCHER_BYTES // 4
"""Memory that one row may take."""
TRIM_BYTES = 8 << 20
"""When a row that took this much leaves, memory is given back to the system."""
ANSWER_S = 0.002
"""How long answers are collected while quick rows are followed."""
MAX_COSTS = 4096
"""Grammars whose cost is remembered."""
HELD = (
    f"other grammars take the memory that there is to follow grammars, and none ended in {WAIT_S:g} s; try again later"
)


class GuideServer:
    """Owns the guides of rows in a guide process. Each has matchers of its own, so no row depends on others.

    Turns: rows with something to do share the CPU time by weighted fair queueing. A row that has not proven quick goes
    after the quick ones that begin now.

    Memory: while all matchers together take more than half of what they may, rows that are not open yet wait for others
    to leave, for WAIT_S at most. A row that takes more than ROW_BYTES ends. If all take more than
    they may, the newest row with at least an equal share ends.
    """

    def __init__(
        self,
        channel: Channel[ToGuides],
        shared: SharedMasks,
        model_dir: str,
        vocab_size: int,
        memory: ProcessMemory,
        limit_cpu: Callable[[float], None] = limit_cpu,
    ) -> None:
        self._channel = channel
        self._shared = shared
        self._memory = memory
        self._limit_cpu = limit_cpu
        self._model_dir = model_dir
        self._vocab_size = vocab_size
        self._prepared: tuple[bytes, Compiler, MaskArray, TokenTexts] | None = None
        self._rows: dict[int, FollowedRow] = {}
        self._turns = FairQueue[FollowedRow, FollowedRow](lambda row: row.expected_s)
        self._costs: OrderedDict[int, GrammarCost] = OrderedDict()
        self._waiting: list[FollowedRow] = []
        self._resident_bytes = 0
        self._held_bytes = 0
        self._answers = GuideAnswers([], [], [])
        self._answered_s = 0.0

    @property
    def is_busy(self) -> bool:
        """Return whether a row has something to do."""
        return bool(self._turns)

    def turn(self, wait_s: float) -> None:
        """Take what arrived, work for one row, and answer. Without work, wait at most `wait_s` for some."""
        self._shared.num_heartbeats[0] += 1
        message = self._channel.receive(0.0 if self._turns else min(wait_s, WAIT_S) if self._waiting else wait_s)
        while message is not None:
            self._take(message)
            message = self._channel.receive()
        if self._waiting:
            now_s = time.monotonic()
            for late in [each for each in self._waiting if now_s - each.waits_since_s > WAIT_S]:
                self._refuse(late, UnavailableError(HELD))
        if (row := self._turns.pop()) is not None:
            if not row.is_quick:
                self._answer()
            self._work(row)
        if not self._turns or time.monotonic() - self._answered_s > ANSWER_S:
            self._answer()

    def _take(self, message: ToGuides) -> None:
        if isinstance(message, AppendTokens | DraftTokens):
            token_ids, start = unpack_ids(message.token_ids).tolist(), 0
            for life, count in zip(message.lives, message.counts, strict=True):
                if (row := self._rows.get(life)) is not None:
                    self._add(row, token_ids[start : start + count], isinstance(message, DraftTokens))
                start += count
        elif isinstance(message, OpenRow):
            cost, output = self.cost(message.guide), deque(unpack_ids(message.output).tolist())
            if message.is_quick and cost.token_s is None:
                cost.token_s = 0.0
            row = self._rows[message.life] = FollowedRow(message, cost, output)
            self._add_turn(row)
        elif (row := self._rows.get(message.life)) is not None:
            self._forget(row)

    def cost(self, guide: Guide) -> GrammarCost:
        """Return what following a grammar has cost, to be added to."""
        key = hash(guide.grammar)
        found = self._costs.setdefault(key, GrammarCost(guide.compile_s))
        self._costs.move_to_end(key)
        if len(self._costs) > MAX_COSTS:
            self._costs.popitem(last=False)
        return found

    def _add_turn(self, row: FollowedRow) -> None:
        """Give a row a turn if it has none."""
        if row not in self._turns:
            self._turns.push(row, row)

    def _add(self, row: FollowedRow, token_ids: list[int], are_drafts: bool) -> None:
        """Give a row tokens to follow, after which earlier drafts mean nothing, or new drafts."""
        if are_drafts:
            row.drafts = tuple(token_ids)
        else:
            row.todo.extend(token_ids)
            row.drafts = ()
        self._add_turn(row)

    def _work(self, row: FollowedRow) -> None:
        """Compile the grammar of a row, or follow one of its tokens; then answer, or give it another turn."""
        if row.guide is None and self._held_bytes > MAX_MATCHER_BYTES // 2:
            row.waits_since_s = row.waits_since_s or time.monotonic()
            self._waiting.append(row)
            return
        try:
            self._prepare(row.source.eos_ids)  # no row's fault if it ends the process
            self._shared.at_work[0] = row.source.life
            self._step(row)
        except RequestError as error:
            self._refuse(row, error)
        except MemoryError:
            self._refuse(row, too_large())
        except BaseException as error:  # such as a panic of llguidance: the row ends, with its matcher
            self._refuse(row, RequestFailedError(f"the grammar could not be followed: {str(error)[:200]}"))
        else:
            self._answer_choice(row)
        self._shared.at_work[0] = 0
        self._measure(row)

    def _step(self, row: FollowedRow) -> None:
        """Compile the grammar of a row, or follow one of its tokens, or all drafts, within the limits."""
        if row.guide is None:
            compiler, bits, texts = self._prepare(row.source.eos_ids)
            grammar = row.source.guide.grammar
            compile = None if grammar is None else partial(compiler.compile, grammar)
            eos_ids = id_list(row.source.eos_ids)
            guide = RowGuide(row.source.guide, eos_ids, compile, bits, row.source.jumps, texts)
            self._within(row, guide.open, compiles=True)
            row.guide = guide
        elif row.todo:
            row.num_tokens += 1
            append = partial(row.guide.append, row.todo.popleft())
            self._within(row, append, compiles=row.guide.may_compile)
            if row.used_s > ROW_S + ROW_TOKEN_S * row.num_tokens:
                raise GrammarError("the grammar takes too long to follow; simplify it, or make it less ambiguous")
        elif row.drafts:
            self._look_ahead(row, row.guide)

    def _look_ahead(self, row: FollowedRow, guide: RowGuide) -> None:
        """Write the masks after the drafts of a row, as far as they match."""
        drafts, row.drafts = row.drafts, ()
        masks, found = self._shared.masks[row.source.row], 0

        def look() -> None:
            nonlocal found
            found = guide.look_ahead(drafts[: len(masks) - 1], masks)

        before_s = row.used_s
        self._within(row, look, compiles=False, count=len(drafts))
        row.used_s = before_s  # what its own tokens may take depends on no drafts
        self._answers.aheads.append(RowAhead(row.source.life, row.num_tokens, found))

    def _within(self, row: FollowedRow, work: Callable[[], None], compiles: bool, count: int = 1) -> None:
        """Do `work` for a row, for `count` tokens if it compiles nothing, and count its CPU time.

        More than it may take ends the process.
        """
        started_s = time.process_time()
        self._limit_cpu(OPEN_S if compiles else TOKEN_S)
        try:
            work()
        finally:
            self._limit_cpu(0.0)
            used_s = time.process_time() - started_s
            row.used_s += 0.0 if compiles else used_s
            if row.guide is not None:
                self._turns.charge(row, used_s)
            row.cost.add(used_s / count, is_token=not compiles)

    def _prepare(self, eos_ids: bytes) -> tuple[Compiler, MaskArray, TokenTexts]:
        """Return the compiler for outputs that end with one of `eos_ids`, masks to write, and texts of tokens."""
        if self._prepared is None or self._prepared[0] != eos_ids:
            compiler = Compiler.of(self._model_dir, self._vocab_size, id_list(eos_ids))
            self._prepared = eos_ids, compiler, np.zeros(compiler.num_words, np.uint32), TokenTexts(compiler.tokens)
            self._resident_bytes = self._memory.resident_bytes()
        return self._prepared[1:]

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
        is_masked, pace = choice.mask is not None, row.cost.pace
        said = RowChoice(
            row.source.life, row.num_tokens, choice.forced, is_masked, pace, choice.is_done, choice.expected
        )
        self._answers.choices.append(said)

    def _refuse(self, row: FollowedRow, error: RequestError) -> None:
        refusal = RowRefusal(row.source.life, error.status, error.error_code, str(error))
        self._answers.refusals.append(refusal)
        self._forget(row)

    def _forget(self, row: FollowedRow) -> None:
        """Drop a row, whatever it has yet to do, and all that its matcher learned."""
        row.guide = None
        self._rows.pop(row.source.life, None)
        self._turns.forget(row)
        self._held_bytes -= row.num_bytes
        if row.num_bytes > TRIM_BYTES:
            self._memory.trim()
            self._resident_bytes = self._memory.resident_bytes()
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if each is not row:
                self._add_turn(each)

    def _measure(self, row: FollowedRow) -> None:
        """Count the memory that a row took; end it if that is too much, or another one if there is too little."""
        resident_bytes = self._memory.resident_bytes()
        grown_bytes = max(0, resident_bytes - self._resident_bytes)
        self._resident_bytes = resident_bytes
        if row.source.life not in self._rows:
            return
        row.num_bytes += grown_bytes
        self._held_bytes += grown_bytes
        if row.num_bytes > ROW_BYTES:
            self._refuse(row, too_large())
        elif self._held_bytes > MAX_MATCHER_BYTES:
            share = self._held_bytes / len(self._rows)
            newest = max(each.source.life for each in self._rows.values() if each.num_bytes >= share)
            self._refuse(self._rows[newest], UnavailableError(HELD))

    def _answer(self) -> None:
        """Send what is new since the last answer."""
        if self._answers.choices or self._answers.refusals or self._answers.aheads:
            self._channel.send(self._answers)
            self._answers = GuideAnswers([], [], [])
        self._answered_s = time.monotonic()


def too_large() -> GrammarError:
    return GrammarError(f"the grammar takes more than {format_size(ROW_BYTES)} of memory to follow; simplify it")
