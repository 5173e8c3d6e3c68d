"""Which turn to practise next: a new one, or one that went badly when it was last seen.

The last stages practise all problems: with 15 % held out 99.8 % were right, but a wrong sum should mean a wrong engine.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

from .arithmetic import Problem

SMALL_SHARE = 0.1  # single digits, which people ask most and which are few among all problems
DIFFERENCE_SHARE = 0.65  # differences are harder to learn than sums
FORGET = 0.3  # loss below which a turn is known


class Turn(NamedTuple):
    """A question and its reply, the problem if it is a sum or difference, and whether earlier turns do not matter."""

    question: str
    reply: str
    problem: Problem | None = None
    alone: bool = True


class Practice:
    """The problems of a stage, and the turns to go over again, each with the loss it had when it was last seen."""

    def __init__(self, problems: Iterable[Problem], again_share: float = 0.0):
        """Draw from `problems`, and `again_share` of all turns from those that went badly."""
        self.problems = set(problems)
        known = sorted(self.problems)
        self.by_operator = {op: [p for p in known if p.operator == op] for op in "+-"}
        self.small = {op: [p for p in rest if max(p.a, p.b) <= 9] for op, rest in self.by_operator.items()}
        self.again_share = again_share
        self.losses: dict[Turn, float] = {}
        self.cumulated: list[float] | None = None

    def problem(self, rng: random.Random) -> Problem:
        """Draw a problem."""
        operator = "-" if rng.random() < DIFFERENCE_SHARE else "+"
        return rng.choice((self.small if rng.random() < SMALL_SHARE else self.by_operator)[operator])

    def again(self, rng: random.Random) -> Turn | None:
        """Draw a turn that went badly, or none if it is time for a new one."""
        if not self.losses or rng.random() >= self.again_share:
            return None
        self.cumulated = self.cumulated or list(accumulate(self.losses.values()))
        return rng.choices(list(self.losses), cum_weights=self.cumulated)[0]

    def saw(self, turn: Turn, loss: float) -> None:
        """Note how a turn went, unless its reply is right only where it stands."""
        self.cumulated = None
        if loss <= FORGET:
            self.losses.pop(turn, None)
        elif turn.alone:
            self.losses[turn] = loss
