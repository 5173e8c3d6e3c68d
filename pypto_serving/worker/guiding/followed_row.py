"""FollowedRow: a row that a guide process follows, and what its grammar costs."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from pypto_serving.worker.guiding.wire import OpenRow, Pace
from pypto_serving.worker.row_guide import RowGuide

SLOW_S = 0.02
"""A grammar that takes this much CPU time to compile, or for a token, is slow."""
DECAY = 0.9
"""What a token took decays by this factor with each later one, so that no grammar is slow for good."""
STEADY_S = 0.001
"""CPU time that each token of a grammar may take in the long run; what exceeds it adds up."""
DEBT_S = 0.1
"""A grammar with this much CPU time beyond STEADY_S for each token is slow, however little one token takes."""


@dataclass
class GrammarCost:
    """What a grammar costs, in CPU time.

    - `compile_s`: the last time that it was compiled, maybe by the API.
    - `token_s`: the slowest token lately, by exponential decay; None until one was followed.
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
            self.token_s = max(DECAY * (self.token_s or 0.0), used_s)
            self.debt_s = min(2 * DEBT_S, max(0.0, self.debt_s + used_s - STEADY_S))
        else:
            self.compile_s = used_s


@dataclass(eq=False)
class FollowedRow:
    """A row that a guide process follows.

    - `guide`: None until its grammar is compiled.
    - `num_tokens`: how many tokens the guide has; `todo`: those that it has yet to append; `drafts`: to be verified
      after all of them.
    - `num_answered`: how many tokens it had when its last choice was sent.
    - `num_bytes`, `used_s`: memory and CPU time that its guide took.
    - `waits_since_s`: when it began to wait for memory.
    """

    source: OpenRow
    cost: GrammarCost
    todo: deque[int]
    guide: RowGuide | None = None
    num_tokens: int = 0
    drafts: tuple[int, ...] = ()
    num_answered: int = -1
    num_bytes: int = 0
    used_s: float = 0.0
    waits_since_s: float = 0.0

    @property
    def is_quick(self) -> bool:
        """Return whether its next turn is known to be quick."""
        return self.cost.is_quick and (self.guide is not None or self.cost.compile_s < SLOW_S)

    @property
    def expected_s(self) -> float:
        """Return the CPU time that its next turn may take: more than that of any quick row until it proves quick."""
        return (self.cost.token_s or 0.0) if self.is_quick else SLOW_S + self.cost.lately_s
