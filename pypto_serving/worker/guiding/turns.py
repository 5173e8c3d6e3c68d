"""Turns: which row the guide process works for next."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from dataclasses import dataclass

from pypto_serving.types.guide import Grammar
from pypto_serving.worker.guiding.wire import OpenRow
from pypto_serving.worker.row_guide import RowGuide

SLOW_S = 0.05
"""CPU time to compile a grammar, or to follow a token, from which on that is slow."""
OLDEST_TURN = 4
MAX_COSTS = 4096
"""Grammars whose cost is remembered."""


@dataclass
class Cost:
    """What a grammar has cost so far: all together, and when it was compiled last.

    `is_quick`: whether following each token was quick; None until one was followed.
    """

    used_s: float = 0.0
    compile_s: float = 0.0
    is_quick: bool | None = None

    def add(self, used_s: float, is_token: bool) -> None:
        """Add the CPU time to compile the grammar, or to follow a token."""
        self.used_s += used_s
        if is_token:
            self.is_quick = self.is_quick is not False and used_s < SLOW_S
        else:
            self.compile_s = used_s


@dataclass(eq=False)
class FollowedRow:
    """A row that the guide process follows.

    - `guide`: None until its grammar is compiled.
    - `num_tokens`: how many tokens the guide has; `todo`: those that it has yet to append.
    - `is_busy`: whether it has a turn to come, or waits for memory.
    - `is_gone`: whether it was dropped.
    - `num_bytes`, `used_s`: memory and CPU time that its guide took.
    - `waits_since_s`: when it began to wait for memory.
    """

    source: OpenRow
    cost: Cost
    todo: deque[int]
    guide: RowGuide | None = None
    num_tokens: int = 0
    is_busy: bool = False
    is_gone: bool = False
    num_bytes: int = 0
    used_s: float = 0.0
    waits_since_s: float = 0.0


class Turns:
    """Owns the order of rows that have something to do.

    First come rows whose next token, or grammar, has proven quick, in order of arrival. Behind them the others: the
    grammar that used the least CPU time first, so that one that is slow holds up the others for one token at most; of
    those that hardly used any, the shortest. Every OLDEST_TURN-th turn of theirs goes to the one that waits longest.
    """

    def __init__(self) -> None:
        self._quick: deque[FollowedRow] = deque()
        self._others: list[tuple[float, int, int, FollowedRow]] = []
        self._arrivals = itertools.count()
        self._num_turns = 0
        self._costs: OrderedDict[int, Cost] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._quick or self._others)

    @property
    def has_quick(self) -> bool:
        """Return whether a quick row has a turn."""
        return bool(self._quick)

    def cost(self, grammar: Grammar | None) -> Cost:
        """Return what following a grammar has cost, to be added to."""
        key = hash(grammar)
        found = self._costs.setdefault(key, Cost())
        self._costs.move_to_end(key)
        if len(self._costs) > MAX_COSTS:
            self._costs.popitem(last=False)
        return found

    def add(self, row: FollowedRow) -> None:
        """Give a row a turn if it has none."""
        if row.is_busy:
            return
        row.is_busy = True
        if row.cost.is_quick and (row.guide is not None or row.cost.compile_s < SLOW_S):
            self._quick.append(row)
        else:
            grammar = row.source.guide.grammar
            size = 0 if grammar is None else len(grammar.text)
            entry = (row.cost.used_s // SLOW_S, size, next(self._arrivals), row)
            heapq.heappush(self._others, entry)

    def next(self) -> FollowedRow | None:
        """Take the next turn; None if there is none. Rows that are gone have none."""
        while self:
            row = self._quick.popleft() if self._quick else self._next_other()
            if not row.is_gone:
                row.is_busy = False
                return row
        return None

    def _next_other(self) -> FollowedRow:
        self._num_turns += 1
        if self._num_turns % OLDEST_TURN:
            return heapq.heappop(self._others)[-1]
        oldest = min(self._others, key=lambda entry: entry[2])
        self._others.remove(oldest)
        heapq.heapify(self._others)
        return oldest[-1]
