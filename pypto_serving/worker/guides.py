"""RowGuides: the guides of a worker's rows, followed by processes of their own while the next step is computed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pypto_serving.errors import RequestError
from pypto_serving.types.arrays import Int32Array
from pypto_serving.types.sampling import RowSampling
from pypto_serving.worker.guide_client import GuideClient, KnownGrammars
from pypto_serving.worker.guided_row import NOTHING, GuidedRow
from pypto_serving.worker.guiding.process import GuideProcess
from pypto_serving.worker.masks import RowMasks

PATIENCE_S = 0.01
"""How long a step waits at its end for the guides of its rows. A row without what it needs is computed again."""
IDLE_PATIENCE_S = 0.05
"""How long a step waits that can sample no row at all."""
MAX_UNWAITED = 64
"""For how many tokens at most no step waits for a row whose guide came too late. They double each time."""


class StepConstraints(NamedTuple):
    """What guides allow the n rows that sample, by index.

    - `guides`: of the rows that have one.
    - `withheld`: rows that cannot sample yet.
    - `forced`: what a row appends in place of a sampled token.
    - `faults`: why a row cannot go on.
    - `known_drafts`: after how many of a row's drafts the allowed tokens are known.
    """

    guides: dict[int, GuidedRow]
    withheld: set[int]
    forced: dict[int, tuple[int, ...]]
    faults: dict[int, RequestError]
    known_drafts: dict[int, int]


class RowGuides:
    """Owns what is known of the guides of rows. Rows without one cost nothing.

    Two processes follow grammars: one the quick ones, the other the slow ones, so that no other token waits for theirs.
    The first row with such a grammar starts each. `_clients` has the quick one first; () until a row has a guide.
    """

    def __init__(self, make_process: Callable[[], GuideProcess], masks: RowMasks) -> None:
        self._make_process = make_process
        self._masks = masks
        self._rows: dict[int, GuidedRow] = {}
        self._known = KnownGrammars()
        self._clients: tuple[GuideClient, ...] = ()

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
        if not self._clients:
            lives = itertools.count(1)
            self._clients = tuple(GuideClient(self._make_process(), lives, self._known) for _ in range(2))
        self._clients[is_slow].open(guided)

    def clear(self, row: int) -> None:
        """Forget the guide of `row`; what it has yet to do is dropped."""
        if (guided := self._rows.pop(row, None)) is None:
            return
        if guided.pace == "quick":
            self._known.set_slow(guided.guide, False)
        self._drop(guided)

    def _drop(self, guided: GuidedRow) -> None:
        for client in self._clients:
            client.drop(guided)

    def close(self) -> None:
        """End the processes."""
        for client in self._clients:
            client.process.close()
        self._clients = ()

    def expected(self, rows: Int32Array) -> dict[int, tuple[int, ...]]:
        """Return what must follow the last token of `rows` [n], by index, where that is known already."""
        if not self._rows:
            return {}
        found = ((i, self._rows.get(row)) for i, row in enumerate(rows.tolist()))
        return {i: guided.expected for i, guided in found if guided is not None and guided.expected}

    def draft(self, rows: Int32Array, known: Int32Array, counts: Int32Array, tokens: Int32Array) -> None:
        """Give guides the `counts` [n] drafts that `rows` [n] verify, after their `known` [n] of `tokens`."""
        for i, row in enumerate(rows.tolist()) if self._rows else ():
            if counts[i] and (guided := self._rows.get(row)) is not None:
                for client in self._clients:
                    client.draft(guided, tokens[row, known[i] : known[i] + counts[i]])
        for client in self._clients:
            client.flush()

    def constrain(self, rows: Int32Array, num_drafts: Int32Array | None = None) -> StepConstraints | None:
        """Return what `rows` [n], which sample now, may choose, and set their masks. Wait a little for the processes.

        A row of -1 has no guide. Row i verifies `num_drafts[i]` drafts. None if no row has a guide.
        """
        if not self._rows:
            return None
        found = {i: guided for i, row in enumerate(rows.tolist()) if (guided := self._rows.get(row)) is not None}
        if not found:
            return None
        self._wait({guided for guided in found.values() if guided.is_busy}, len(rows))
        constraints = StepConstraints(found, set(), {}, {}, {})
        for i, guided in found.items():
            mask = None
            if guided.fault is not None:
                constraints.faults[i] = guided.fault
            elif guided.choice is None:
                constraints.withheld.add(i)
            elif guided.choice.forced:
                constraints.forced[i] = guided.choice.forced
            else:
                mask = guided.choice.mask
            self._masks.put(guided.row, 0, mask)
            if guided.choice is not None and guided.choice.is_done:
                self._masks.lift(guided.row)
                self.clear(guided.row)
            elif num_drafts is not None:
                constraints.known_drafts[i] = self._put_ahead(guided, int(num_drafts[i]))
        return constraints

    def _put_ahead(self, guided: GuidedRow, num_drafts: int) -> int:
        """Set the masks after the drafts of a row; return after how many drafts the allowed tokens are known."""
        ahead = NOTHING if guided.ahead is None else guided.ahead[:num_drafts]
        for draft, mask in enumerate(ahead):
            self._masks.put(guided.row, 1 + draft, mask)
        return len(ahead)

    def _wait(self, wanted: set[GuidedRow], num_rows: int) -> None:
        """Take in what was found out, and wait for `wanted`: longer if the step has no other row to sample.

        Rows that came too late before are not waited for, nor those whose grammar is slow.
        """
        for client in self._clients:
            client.receive(0.0)
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
        found = [client.receive(0.0) for client in self._clients]
        if any(found):
            return True
        lives = {guided.life for guided in late}
        working = next((each for each in self._clients if not lives.isdisjoint(each.rows)), None)
        return working is not None and working.receive(timeout_s)

    def append(self, rows: Int32Array, constraints: StepConstraints, counts: Int32Array, token_ids: Int32Array) -> None:
        """Append what `rows` [n] appended: `counts` [n] of `token_ids`, row after row. Those that were slow move."""
        ends = counts.cumsum()
        for i, guided in constraints.guides.items():
            if not counts[i] or self._rows.get(guided.row) is not guided:
                continue
            new = token_ids[ends[i] - counts[i] : ends[i]]
            guided.append(new.tolist())
            guided.unwaited = max(0, guided.unwaited - 1)
            is_here = guided.life in self._clients[0].rows
            if guided.pace == "slow" and guided.guide.grammar is not None and is_here:
                self._known.set_slow(guided.guide, True)
                self._drop(guided)
                self._open(guided, is_slow=True)
            else:
                for client in self._clients:
                    client.append(guided, new)
        for client in self._clients:
            client.flush()
