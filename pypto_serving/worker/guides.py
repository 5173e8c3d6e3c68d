"""RowGuides: the guides of a worker's rows, followed by a process of their own while the next step is computed."""

from __future__ import annotations

import itertools
import signal
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import NamedTuple

import numpy as np

from pypto_serving.errors import RequestError, RequestFailedError
from pypto_serving.guidance import GrammarError
from pypto_serving.types.arrays import Int32Array
from pypto_serving.types.sampling import RowSampling
from pypto_serving.types.tokens import pack_ids
from pypto_serving.worker.guiding.process import Death, GuideProcess
from pypto_serving.worker.guiding.wire import AppendTokens, DropRow, OpenRow, RowRefusal
from pypto_serving.worker.masks import RowMasks
from pypto_serving.worker.row_guide import Choice

PATIENCE_S = 0.01
"""How long a step waits at its end for the guides of its rows. A row without what it needs is computed again."""
IDLE_PATIENCE_S = 0.05
"""How long a step waits that can sample no row at all."""
MAX_UNWAITED = 64
"""For how many tokens at most no step waits for a row whose guide came too late. They double each time."""
MAX_STRIKES = 3
"""How many processes may end while they work for a row, for reasons that may not be its own."""
MAX_MUTE = 8
"""How many processes may end one after the other for no row and without an answer."""
MAX_REFUSED = 1024
"""Grammars that ended a process, and are remembered."""
OWN_FAULTS: dict[int, str] = {
    signal.SIGPROF: "takes too long to follow: one token took more CPU time than is allowed",
    signal.SIGABRT: "takes too much memory to follow, or nests too deeply",
    signal.SIGSEGV: "nests too deeply to be followed",
}
"""Why a process ended by a signal that the row brought about for which it worked."""


class GuidedRow:
    """A row that is guided, and what its guide said last. Owned by RowGuides.

    - `choice`: what the row may append next; None while that is found out.
    - `fault`: why it cannot go on, or None.
    - `is_quick`: what the process said of its grammar last: see Cost.
    - `unwaited`: no step waits for this many of its tokens, counted from the next one on.
    - `lateness`: how many they were when it came too late the last time; 0 if it has been in time since.
    """

    def __init__(self, life: int, row: int, sampling: RowSampling, output: Sequence[int]) -> None:
        assert sampling.guide is not None
        self.life = life
        self.row = row
        self.guide = sampling.guide
        self.eos_ids = sampling.eos_ids
        self.jumps = sampling.num_logprobs < 0
        self.output = list(output)
        self.choice: Choice | None = None
        self.fault: RequestError | None = None
        self.is_quick = False
        self.unwaited = 1
        self.lateness = 0
        self.num_strikes = 0

    @property
    def is_busy(self) -> bool:
        return self.choice is None and self.fault is None

    def fail(self, error: RequestError) -> None:
        """Let the row go on no more. If that is due to its grammar, name the field of the request that it is from."""
        self.fault = error
        if error.status < HTTPStatus.INTERNAL_SERVER_ERROR and self.guide.grammar is not None:
            self.fault = RequestError(f"{self.guide.field}: {error}", param=self.guide.field, code=error.error_code)
            self.fault.status = error.status


class Told(NamedTuple):
    """What guides say of the n rows that sample, by index.

    - `guides`: of the rows that have one.
    - `withheld`: rows that cannot sample yet.
    - `forced`: what a row appends in place of a sampled token.
    - `faults`: why a row cannot go on.
    """

    guides: dict[int, GuidedRow]
    withheld: set[int]
    forced: dict[int, tuple[int, ...]]
    faults: dict[int, RequestError]


class RowGuides:
    """Owns what is known of the guides of rows. Rows without one cost nothing.

    Grammars are followed by a process, which the first row that has one starts. What it says depends on the guide and
    the tokens of a row alone, so when it dies, another one follows the same rows from their first token on.
    """

    def __init__(self, make_process: Callable[[], GuideProcess], masks: RowMasks) -> None:
        self._make_process = make_process
        self._masks = masks
        self._process: GuideProcess | None = None
        self._rows: dict[int, GuidedRow] = {}
        self._followed: dict[int, GuidedRow] = {}
        self._lives = itertools.count(1)
        self._refused: OrderedDict[int, RequestError] = OrderedDict()

    def start(self, row: int, sampling: RowSampling, output: Sequence[int]) -> None:
        """Guide `row`, which has the tokens `output` already."""
        guided = self._rows[row] = GuidedRow(next(self._lives), row, sampling, output)
        if guided.guide.grammar is not None and (error := self._refused.get(hash(guided.guide.grammar))) is not None:
            guided.fail(error)
        else:
            self._followed[guided.life] = guided
            self._open(guided)

    def _open(self, guided: GuidedRow) -> None:
        """Let the process follow a row from its first token on."""
        if self._process is None:
            self._process = self._make_process()
        row, guide, output = guided.row, guided.guide, pack_ids(guided.output)
        self._process.send(OpenRow(guided.life, row, guide, guided.eos_ids, guided.jumps, output, guided.is_quick))

    def clear(self, row: int) -> None:
        """Forget the guide of `row`; what it has yet to do is dropped."""
        guided = self._rows.pop(row, None)
        if guided is not None and self._followed.pop(guided.life, None) is not None and self._process is not None:
            self._process.send(DropRow(guided.life))

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def tell(self, rows: Int32Array) -> Told | None:
        """Say what `rows` [n], which sample now, may choose, and set their masks. Wait a little for the process.

        None if no row has a guide.
        """
        if not self._rows:
            return None
        found = {i: guided for i, row in enumerate(rows.tolist()) if (guided := self._rows.get(row)) is not None}
        if not found:
            return None
        if self._followed:
            self._wait({guided for guided in found.values() if guided.is_busy}, len(rows))
        told = Told(found, set(), {}, {})
        for i, guided in found.items():
            mask = None
            if guided.fault is not None:
                told.faults[i] = guided.fault
            elif guided.choice is None:
                told.withheld.add(i)
            elif guided.choice.forced:
                told.forced[i] = guided.choice.forced
            else:
                mask = guided.choice.mask
            self._masks.put(guided.row, 0, mask)
            if guided.choice is not None and guided.choice.is_done:
                self.clear(guided.row)
        return told

    def _wait(self, wanted: set[GuidedRow], num_rows: int) -> None:
        """Take in what the process found out, and wait for `wanted`: longer if the step has no other row to sample.

        Rows that came too late before are not waited for.
        """
        self._receive(0.0)
        idle = len(wanted) == num_rows
        until_s = time.monotonic() + (IDLE_PATIENCE_S if idle else PATIENCE_S)
        while any(guided.is_busy and (idle or not guided.unwaited) for guided in wanted):
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not self._receive(left_s):
                break
            if idle and not all(guided.is_busy for guided in wanted):
                idle, until_s = False, min(until_s, time.monotonic() + PATIENCE_S)
        for guided in wanted:
            if not guided.unwaited:
                guided.lateness = min(MAX_UNWAITED, 2 * guided.lateness or 1) if guided.is_busy else 0
                guided.unwaited = guided.lateness and 1 + guided.lateness

    def _receive(self, timeout_s: float) -> bool:
        """Take in what the process found out so far; return False for nothing. If it died, start over."""
        assert self._process is not None
        answers = self._process.receive(timeout_s)
        if answers is None:
            if (death := self._process.death()) is not None:
                self._bury(death)
            return False
        while answers is not None:
            for choice in answers.choices:
                guided = self._followed.get(choice.life)
                if guided is not None and choice.num_tokens == len(guided.output):
                    mask = self._process.shared.masks[guided.row] if choice.is_masked else None
                    guided.choice, guided.is_quick = Choice(choice.forced, mask, choice.is_done), choice.is_quick
            for refusal in answers.refusals:
                if (guided := self._followed.pop(refusal.life, None)) is not None:
                    guided.fail(_refused(refusal))
            answers = self._process.receive(0.0)
        return True

    def _bury(self, death: Death) -> None:
        """Find out who is to blame for the death of the process, and let another one follow the rows."""
        guilty = self._followed.get(death.life)
        if (
            guilty is not None
            and guilty.guide.grammar is not None
            and (words := OWN_FAULTS.get(death.signal)) is not None
        ):
            error = GrammarError(f"the grammar {words}; simplify it, or make it less ambiguous")
            self._fail(guilty, error)
            self._remember(guilty, error)
        elif guilty is not None:
            guilty.num_strikes += 1
            if guilty.num_strikes == MAX_STRIKES:
                self._fail(guilty, RequestFailedError(f"{MAX_STRIKES} processes ended while they followed its grammar"))
        if death.num_mute >= MAX_MUTE:
            for guided in list(self._followed.values()):
                self._fail(guided, RequestFailedError("the process that follows grammars keeps ending; see the log"))
        for guided in sorted(self._followed.values(), key=lambda each: each.num_strikes):
            guided.choice, guided.life = None, next(self._lives)
            self._open(guided)
        self._followed = {guided.life: guided for guided in self._followed.values()}

    def _fail(self, guided: GuidedRow, error: RequestError) -> None:
        self._followed.pop(guided.life, None)
        guided.fail(error)

    def _remember(self, guided: GuidedRow, error: RequestError) -> None:
        self._refused[hash(guided.guide.grammar)] = error
        if len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)

    def follow(self, rows: Int32Array, told: Told, counts: Int32Array, token_ids: Int32Array) -> None:
        """Append what `rows` [n] appended: `counts` [n] of `token_ids`, row after row."""
        ends = counts.cumsum()
        lives: list[int] = []
        appended: list[Int32Array] = []
        for i, guided in told.guides.items():
            if not counts[i] or self._rows.get(guided.row) is not guided:
                continue
            new = token_ids[ends[i] - counts[i] : ends[i]]
            guided.choice = None
            guided.unwaited = max(0, guided.unwaited - 1)
            guided.output += new.tolist()
            lives.append(guided.life)
            appended.append(new)
        if lives and self._process is not None:
            joined = np.concatenate(appended, dtype=np.int32).tobytes()
            self._process.send(AppendTokens(lives, [len(new) for new in appended], joined))


def _refused(refusal: RowRefusal) -> RequestError:
    """Return the error of a request that the process refused."""
    error = RequestError(refusal.message, code=refusal.code)
    error.status = refusal.status
    return error
