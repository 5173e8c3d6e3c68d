"""RowGuides: the guides of a worker's rows, followed by processes of their own while the next step is computed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pypto_serving.errors import RequestError
from pypto_serving.types.arrays import Int32Array
from pypto_serving.types.sampling import RowSampling
from pypto_serving.worker.follower import Follower, KnownGrammars
from pypto_serving.worker.guided_row import NOTHING, GuidedRow
from pypto_serving.worker.guiding.process import GuideProcess
from pypto_serving.worker.masks import RowMasks

PATIENCE_S = 0.01
"""How long a step waits at its end for the guides of its rows. A row without what it needs is computed again."""
IDLE_PATIENCE_S = 0.05
"""How long a step waits that can sample no row at all."""
MAX_UNWAITED = 64
"""For how many tokens at most no step waits for a row whose guide came too late. They double each time."""


class Told(NamedTuple):
    """What guides say of the n rows that sample, by index.

    - `guides`: of the rows that have one.
    - `withheld`: rows that cannot sample yet.
    - `forced`: what a row appends in place of a sampled token.
    - `limits`: behind how many drafts it is known what may follow.
    - `faults`: why a row cannot go on.
    """

    guides: dict[int, GuidedRow]
    withheld: set[int]
    forced: dict[int, tuple[int, ...]]
    faults: dict[int, RequestError]
    limits: dict[int, int]


class RowGuides:
    """Owns what is known of the guides of rows. Rows without one cost nothing.

    Grammars are followed by a process, which the first row that has one starts; those that are slow, by another one,
    so that no other token waits for theirs. `_followers`: the two of them, once a row has a guide.
    """

    def __init__(self, make_process: Callable[[], GuideProcess], masks: RowMasks) -> None:
        self._make_process = make_process
        self._masks = masks
        self._rows: dict[int, GuidedRow] = {}
        self._known = KnownGrammars()
        self._followers: tuple[Follower, ...] = ()

    def start(self, row: int, sampling: RowSampling, output: Sequence[int]) -> None:
        """Guide `row`, which has the tokens `output` already."""
        guided = self._rows[row] = GuidedRow(row, sampling, output)
        grammar = guided.guide.grammar
        if (error := self._known.refusal(grammar)) is not None:
            guided.fail(error)
        else:
            self._open(guided, self._known.is_slow(guided.guide))

    def _open(self, guided: GuidedRow, is_slow: bool) -> None:
        """Let a row be followed from its first token on."""
        if not self._followers:
            lives = itertools.count(1)
            self._followers = tuple(Follower(self._make_process(), lives, self._known) for _ in range(2))
        self._followers[is_slow].open(guided)

    def clear(self, row: int) -> None:
        """Forget the guide of `row`; what it has yet to do is dropped."""
        if (guided := self._rows.pop(row, None)) is None:
            return
        if guided.pace == "quick":
            self._known.set_slow(guided.guide, False)
        self._drop(guided)

    def _drop(self, guided: GuidedRow) -> None:
        for follower in self._followers:
            follower.drop(guided)

    def close(self) -> None:
        """End the processes."""
        for follower in self._followers:
            follower.process.close()
        self._followers = ()

    def expected(self, rows: Int32Array) -> dict[int, tuple[int, ...]]:
        """Return what must follow the last token of `rows` [n], by index, where that is known already."""
        if not self._rows:
            return {}
        found = ((i, self._rows.get(row)) for i, row in enumerate(rows.tolist()))
        return {i: guided.expected for i, guided in found if guided is not None and guided.expected}

    def draft(self, rows: Int32Array, known: Int32Array, counts: Int32Array, tokens: Int32Array) -> None:
        """Let guides know that `rows` [n] verify `counts` [n] drafts, behind their `known` [n] of `tokens`."""
        for i, row in enumerate(rows.tolist()) if self._rows else ():
            if counts[i] and (guided := self._rows.get(row)) is not None:
                for follower in self._followers:
                    follower.draft(guided, tokens[row, known[i] : known[i] + counts[i]])
        for follower in self._followers:
            follower.flush()

    def tell(self, rows: Int32Array, num_drafts: Int32Array | None = None) -> Told | None:
        """Say what `rows` [n], which sample now, may choose, and set their masks. Wait a little for the processes.

        A row of -1 has no guide. Row i verifies `num_drafts[i]` drafts. None if no row has a guide.
        """
        if not self._rows:
            return None
        found = {i: guided for i, row in enumerate(rows.tolist()) if (guided := self._rows.get(row)) is not None}
        if not found:
            return None
        self._wait({guided for guided in found.values() if guided.is_busy}, len(rows))
        told = Told(found, set(), {}, {}, {})
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
                self._masks.lift(guided.row)
                self.clear(guided.row)
            elif num_drafts is not None:
                told.limits[i] = self._put_ahead(guided, int(num_drafts[i]))
        return told

    def _put_ahead(self, guided: GuidedRow, num_drafts: int) -> int:
        """Set the masks behind the drafts of a row; return behind how many it is known what may follow."""
        ahead = NOTHING if guided.ahead is None else guided.ahead[:num_drafts]
        for draft, mask in enumerate(ahead):
            self._masks.put(guided.row, 1 + draft, mask)
        return len(ahead)

    def _wait(self, wanted: set[GuidedRow], num_rows: int) -> None:
        """Take in what was found out, and wait for `wanted`: longer if the step has no other row to sample.

        Rows that came too late before are not waited for, nor those whose grammar is slow.
        """
        for follower in self._followers:
            follower.receive(0.0)
        idle = len(wanted) == num_rows
        until_s = time.monotonic() + (IDLE_PATIENCE_S if idle else PATIENCE_S)
        while late := [guided for guided in wanted if guided.is_busy and (idle or guided.is_waited_for)]:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not self._receive(left_s, late):
                break
            if idle and not all(guided.is_busy for guided in wanted):
                idle, until_s = False, min(until_s, time.monotonic() + PATIENCE_S)
        for guided in wanted:
            if not guided.unwaited:
                guided.lateness = min(MAX_UNWAITED, 2 * guided.lateness or 1) if guided.is_busy else 0
                guided.unwaited = guided.lateness and 1 + guided.lateness

    def _receive(self, timeout_s: float, late: Sequence[GuidedRow]) -> bool:
        """Take in what processes found out. Without anything wait, for the first that works for one of `late`."""
        found = [follower.receive(0.0) for follower in self._followers]
        if any(found):
            return True
        lives = {guided.life for guided in late}
        working = next((each for each in self._followers if not lives.isdisjoint(each.rows)), None)
        return working is not None and working.receive(timeout_s)

    def follow(self, rows: Int32Array, told: Told, counts: Int32Array, token_ids: Int32Array) -> None:
        """Append what `rows` [n] appended: `counts` [n] of `token_ids`, row after row. Those that were slow move."""
        ends = counts.cumsum()
        for i, guided in told.guides.items():
            if not counts[i] or self._rows.get(guided.row) is not guided:
                continue
            new = token_ids[ends[i] - counts[i] : ends[i]]
            guided.append(new.tolist())
            guided.unwaited = max(0, guided.unwaited - 1)
            is_here = guided.life in self._followers[0].rows
            if guided.pace == "slow" and guided.guide.grammar is not None and is_here:
                self._known.set_slow(guided.guide, True)
                self._drop(guided)
                self._open(guided, is_slow=True)
            else:
                for follower in self._followers:
                    follower.append(guided, new)
        for follower in self._followers:
            follower.flush()
