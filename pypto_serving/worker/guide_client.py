"""GuideClient: the rows that a guide process follows, seen from the worker."""

from __future__ import annotations

import itertools
import signal
from collections import OrderedDict

import numpy as np

from pypto_serving.errors import RequestError, RequestFailedError
from pypto_serving.guidance import GrammarError
from pypto_serving.types.arrays import Int32Array, pack_ids
from pypto_serving.types.guide import Grammar, Guide
from pypto_serving.worker.guided_row import NOTHING, GuidedRow
from pypto_serving.worker.guiding.followed_row import SLOW_S
from pypto_serving.worker.guiding.process import Death, GuideProcess
from pypto_serving.worker.guiding.wire import (
    AppendTokens,
    DraftTokens,
    DropRow,
    OpenRow,
    RowAhead,
    RowChoice,
    RowRefusal,
)
from pypto_serving.worker.row_guide import NextTokens

MAX_CRASHES = 3
"""How many processes may end while they work for a row, for reasons that may not be its own."""
MAX_MUTE = 8
"""How many processes may end one after the other for no row and without an answer."""
MAX_LEFT = 1024
"""Rows that left, whose grammars are kept while their process may still work for them."""
MAX_REMEMBERED = 1024
"""Grammars remembered as refused, and as many whose pace differs from that of their check."""
OWN_FAULTS: dict[int, str] = {
    signal.SIGPROF: "takes too long to follow: one token took more CPU time than is allowed",
    signal.SIGABRT: "takes too much memory to follow, or nests too deeply",
    signal.SIGSEGV: "nests too deeply to be followed",
}
"""Signals that the row which a process works for brings about, and why."""


class KnownGrammars:
    """Remembers grammars that are refused at once, and which were slow here. Owned by RowGuides."""

    def __init__(self) -> None:
        self._refused: OrderedDict[int, RequestError] = OrderedDict()
        self._slow: OrderedDict[int, bool] = OrderedDict()

    def refusal(self, grammar: Grammar | None) -> RequestError | None:
        """Return why a grammar is refused, or None."""
        return None if grammar is None else self._refused.get(hash(grammar))

    def refuse(self, grammar: Grammar, error: RequestError) -> None:
        """Refuse a grammar when it comes again."""
        self._refused[hash(grammar)] = error
        if len(self._refused) > MAX_REMEMBERED:
            self._refused.popitem(last=False)

    def is_slow(self, guide: Guide) -> bool:
        """Return whether a guide's grammar was slow here, or if it is new, when it was checked."""
        return self._slow.get(hash(guide.grammar), guide.compile_s >= SLOW_S)

    def set_slow(self, guide: Guide, is_slow: bool) -> None:
        """Remember whether a guide's grammar is slow."""
        if self.is_slow(guide) != is_slow:
            self._slow[hash(guide.grammar)] = is_slow
            if len(self._slow) > MAX_REMEMBERED:
                self._slow.popitem(last=False)


class GuideClient:
    """Owns a guide process and knows the rows that it follows, by their lives. Owned by RowGuides.

    The answers of a process depend on the guide and the tokens of a row alone. So when it dies, another one follows the
    same rows from their first token on. It may be working for a row that has left; its grammar is judged all the same.
    """

    def __init__(self, process: GuideProcess, lives: itertools.count[int], known: KnownGrammars) -> None:
        self.process = process
        self.rows: dict[int, GuidedRow] = {}
        self._lives = lives
        self._known = known
        self._left: OrderedDict[int, Guide] = OrderedDict()
        self._appended: list[tuple[int, Int32Array]] = []
        self._drafted: list[tuple[int, Int32Array]] = []

    def open(self, guided: GuidedRow) -> None:
        """Follow a row from its first token on."""
        guided.choice, guided.ahead, guided.life = None, NOTHING, next(self._lives)
        self.rows[guided.life] = guided
        is_quick, output = guided.pace == "quick", pack_ids(guided.output)
        opened = OpenRow(guided.life, guided.row, guided.guide, guided.eos_ids, guided.jumps, output, is_quick)
        self.process.send(opened)

    def drop(self, guided: GuidedRow) -> None:
        """Stop following a row, and drop the work left for it."""
        if self.rows.pop(guided.life, None) is not None:
            self.process.send(DropRow(guided.life))
            if guided.guide.grammar is not None:
                self._left[guided.life] = guided.guide
                if len(self._left) > MAX_LEFT:
                    self._left.popitem(last=False)

    def append(self, guided: GuidedRow, token_ids: Int32Array) -> None:
        """Append what a row appended, with the next `flush`."""
        if guided.life in self.rows:
            self._appended.append((guided.life, token_ids))

    def draft(self, guided: GuidedRow, token_ids: Int32Array) -> None:
        """Ask with the next `flush` which tokens are allowed after each draft of a row."""
        if guided.life in self.rows:
            guided.ahead = None
            self._drafted.append((guided.life, token_ids))

    def flush(self) -> None:
        """Send the process what rows appended, and their drafts after that."""
        if self._appended:
            self.process.send(AppendTokens(*_packed(self._appended)))
            self._appended = []
        if self._drafted:
            self.process.send(DraftTokens(*_packed(self._drafted)))
            self._drafted = []

    def receive(self, timeout_s: float) -> bool:
        """Take the answers of the process; return False if there are none. If it died, start another."""
        if not self.rows:
            return False
        answers = self.process.receive(timeout_s)
        if answers is None:
            if (death := self.process.death()) is not None:
                self._recover(death)
            return False
        while answers is not None:
            for choice in answers.choices:
                self._take(choice)
            for ahead in answers.aheads:
                self._take_ahead(ahead)
            for refusal in answers.refusals:
                if (guided := self.rows.pop(refusal.life, None)) is not None:
                    guided.fail(_refused(refusal))
            answers = self.process.receive(0.0)
        return True

    def _take(self, choice: RowChoice) -> None:
        guided = self.rows.get(choice.life)
        if guided is not None and choice.num_tokens == len(guided.output):
            mask = self.process.shared.masks[guided.row, 0] if choice.is_masked else None
            guided.choice, guided.pace = NextTokens(choice.forced, mask, choice.is_done, choice.expected), choice.pace
        elif choice.pace == "slow" and (guide := self._left.get(choice.life)) is not None:
            self._known.set_slow(guide, True)

    def _take_ahead(self, ahead: RowAhead) -> None:
        guided = self.rows.get(ahead.life)
        if guided is not None and guided.ahead is None and ahead.num_tokens == len(guided.output):
            guided.ahead = self.process.shared.masks[guided.row, 1 : 1 + ahead.num_drafts]

    def _recover(self, death: Death) -> None:
        """Blame the row that ended the process, and let another process follow the rows."""
        guilty = self.rows.get(death.life)
        guide = self._left.get(death.life) if guilty is None else guilty.guide
        grammar = None if guide is None else guide.grammar
        self._left.clear()
        if grammar is not None and (words := OWN_FAULTS.get(death.signal)) is not None:
            error = GrammarError(f"the grammar {words}; simplify it, or make it less ambiguous")
            self._known.refuse(grammar, error)
            if guilty is not None:
                self._fail(guilty, error)
        elif guilty is not None:
            guilty.num_crashes += 1
            if guilty.num_crashes == MAX_CRASHES:
                self._fail(guilty, RequestFailedError(f"{MAX_CRASHES} processes ended while they followed its grammar"))
        if death.num_mute >= MAX_MUTE:
            for guided in list(self.rows.values()):
                self._fail(guided, RequestFailedError("the process that follows grammars keeps ending; see the log"))
        rows, self.rows = self.rows.values(), {}
        for guided in sorted(rows, key=lambda each: each.num_crashes):
            self.open(guided)

    def _fail(self, guided: GuidedRow, error: RequestError) -> None:
        self.rows.pop(guided.life, None)
        guided.fail(error)


def _packed(pieces: list[tuple[int, Int32Array]]) -> tuple[list[int], list[int], bytes]:
    """Return the lives of rows, how many tokens each has, and all tokens."""
    lives, tokens = zip(*pieces, strict=True)
    return list(lives), [len(each) for each in tokens], np.concatenate(tokens, dtype=np.int32).tobytes()


def _refused(refusal: RowRefusal) -> RequestError:
    """Return the error of a request that the process refused."""
    error = RequestError(refusal.message, code=refusal.code)
    error.status = refusal.status
    return error
