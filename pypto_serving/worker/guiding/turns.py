"""Turns: which row a guide process works for next."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from dataclasses import dataclass

from pypto_serving.types.guide import Guide
from pypto_serving.worker.guiding.wire import OpenRow, Pace
from pypto_serving.worker.row_guide import RowGuide

SLOW_S = 0.02
"""CPU time to compile a grammar, or to follow a token, from which on that is slow."""
FADING = 0.9
"""What a token took counts that much less with each one that follows, so that no grammar is slow for good."""
STEADY_S = 0.001
"""CPU time that each token of a grammar may take in the long run; what goes beyond it adds up."""
DEBT_S = 0.1
"""A grammar with so much CPU time beyond STEADY_S for each token is slow, however little one token takes."""
OLDEST_TURN = 4
MAX_COSTS = 4096
"""Grammars whose cost is remembered."""


@dataclass
class Cost:
    """What a grammar costs, in CPU time.

    - `compile_s`: the last time that it was compiled, maybe by the API.
    - `token_s`: the slowest token lately; None until one was followed.
    - `debt_s`: what tokens took beyond STEADY_S each, less what later ones left of it.
    """

    compile_s: float = 0.0
    token_s: float | None = None
    debt_s: float = 0.0

    @property
    def lately_s(self) -> float:
        return self.compile_s + (self.token_s or 0.0)

    @property
    def is_quick(self) -> bool:
        """Return whether tokens were followed, and lately each of them quickly."""
        return self.token_s is not None and self.token_s < SLOW_S and self.debt_s < DEBT_S

    @property
    def pace(self) -> Pace:
        if self.compile_s >= SLOW_S or (self.token_s or 0.0) >= SLOW_S or self.debt_s >= DEBT_S:
            return "slow"
        return "quick" if self.is_quick else "new"

    def add(self, used_s: float, is_token: bool) -> None:
        """Add the CPU time to compile the grammar, or to follow a token."""
        if is_token:
            self.token_s = max(FADING * (self.token_s or 0.0), used_s)
            self.debt_s = min(2 * DEBT_S, max(0.0, self.debt_s + used_s - STEADY_S))
        else:
            self.compile_s = used_s


@dataclass(eq=False)
class FollowedRow:
    """A row that a guide process follows.

    - `guide`: None until its grammar is compiled.
    - `num_tokens`: how many tokens the guide has; `todo`: those that it has yet to append; `drafts`: what is to be
      verified behind all of them.
    - `num_said`: how many tokens it had when its choice was said last.
    - `is_busy`: whether it has a turn to come, or waits for memory.
    - `is_gone`: whether it was dropped.
    - `num_bytes`, `used_s`: memory and CPU time that its guide took.
    - `share_s`: CPU time on the clock of shares, see Turns.
    - `waits_since_s`: when it began to wait for memory.
    """

    source: OpenRow
    cost: Cost
    todo: deque[int]
    guide: RowGuide | None = None
    num_tokens: int = 0
    drafts: tuple[int, ...] = ()
    num_said: int = -1
    is_busy: bool = False
    is_gone: bool = False
    num_bytes: int = 0
    used_s: float = 0.0
    share_s: float = 0.0
    waits_since_s: float = 0.0


class Turns:
    """Owns the order of rows that have something to do.

    First come rows whose next token, or grammar, has proven quick, by fair queuing: each moves on by what it takes, and
    the one that will be behind all others after its turn is next. So one that takes a tenth of the time has ten times
    the turns. One that had nothing to do begins at `_clock_s`, where the foremost began its turn. Then the others: the
    grammar that lately cost the least first, so that one that is slow holds up the others for one token at most; of
    those that cost hardly anything, or are new, the shortest. Every OLDEST_TURN-th turn of theirs goes to the one that
    waits longest.
    """

    def __init__(self) -> None:
        self._quick: list[tuple[float, int, FollowedRow]] = []
        self._clock_s = 0.0
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

    def cost(self, guide: Guide) -> Cost:
        """Return what following a grammar has cost, to be added to."""
        key = hash(guide.grammar)
        found = self._costs.setdefault(key, Cost(guide.compile_s))
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
            row.share_s = max(self._clock_s, row.share_s)
            entry = (row.share_s + (row.cost.token_s or 0.0), next(self._arrivals), row)
            heapq.heappush(self._quick, entry)
        else:
            grammar = row.source.guide.grammar
            size = 0 if grammar is None else len(grammar.text)
            heapq.heappush(self._others, (row.cost.lately_s // SLOW_S, size, next(self._arrivals), row))

    def next(self) -> FollowedRow | None:
        """Take the next turn; None if there is none. Rows that are gone have none."""
        while self:
            row = self._next_quick() if self._quick else self._next_other()
            if not row.is_gone:
                row.is_busy = False
                return row
        return None

    def _next_quick(self) -> FollowedRow:
        row = heapq.heappop(self._quick)[-1]
        self._clock_s = max(self._clock_s, row.share_s)
        return row

    def _next_other(self) -> FollowedRow:
        self._num_turns += 1
        if self._num_turns % OLDEST_TURN:
            return heapq.heappop(self._others)[-1]
        oldest = min(self._others, key=lambda entry: entry[2])
        self._others.remove(oldest)
        heapq.heapify(self._others)
        return oldest[-1]
