"""Whose turn it is in a guide process: what grammars cost, and how rows share the CPU time."""

from __future__ import annotations

from collections import deque

import numpy as np

from pypto_serving.fair_queue import FairQueue
from pypto_serving.types.guide import Grammar, Guide
from pypto_serving.worker.guiding.followed_row import DEBT_S, SLOW_S, STEADY_S, FollowedRow, GrammarCost
from pypto_serving.worker.guiding.wire import OpenRow
from pypto_serving.worker.reasoning import TokenTexts
from pypto_serving.worker.row_guide import RowGuide

REGEX = Guide(Grammar("regex", "[ab]{2,40}"))


def fair_turns() -> FairQueue[FollowedRow, FollowedRow]:
    return FairQueue(lambda row: row.expected_s)


def quick_row(text: str, token_s: float) -> FollowedRow:
    guide = Guide(Grammar("regex", text))
    row = FollowedRow(OpenRow(1, 0, guide, b"", True, b"", False), GrammarCost(), deque())
    row.cost.add(token_s, is_token=True)
    return row


def test_quick_rows_go_before_new_ones_and_those_before_slow_ones() -> None:
    turns, costs = fair_turns(), dict[str, GrammarCost]()

    def row(text: str, compile_s: float = 0.0) -> FollowedRow:
        guide = Guide(Grammar("regex", text), compile_s=compile_s)
        cost = costs.setdefault(text, GrammarCost(compile_s))
        return FollowedRow(OpenRow(1, 0, guide, b"", True, b"", False), cost, deque())

    slow, slower, quick, late, new = map(row, ("slow", "slower", "quick", "late", "new"))
    long, hard = row("a long one", SLOW_S / 10), row("hard", SLOW_S)
    slow.cost.add(3 * SLOW_S, is_token=True)
    slow.cost.add(0.0, is_token=True)
    slower.cost.add(4 * SLOW_S, is_token=True)
    quick.cost.add(2 * SLOW_S, is_token=False)
    quick.guide = RowGuide(Guide(), (), None, np.zeros(1, np.uint32), True, TokenTexts([b"x"] * 320))
    quick.cost.add(SLOW_S / 2, is_token=True)
    late.cost.add(SLOW_S / 2, is_token=True)
    gone, again = row("late"), row("quick")
    for each in (slower, slow, hard, long, new, gone, again, quick, late):
        turns.push(each, each)
    turns.forget(gone)
    order = []
    while (each := turns.pop()) is not None:
        order.append(each)
    assert order == [quick, late, new, long, hard, again, slow, slower] and not turns, "another compile is slow"


def test_new_and_slow_rows_get_turns_however_many_quick_ones_there_are() -> None:
    """Once the next turn of each quick row would give it more CPU time than theirs may take."""
    turns, many = fair_turns(), [quick_row(str(number), SLOW_S / 4) for number in range(10)]
    new = FollowedRow(OpenRow(1, 0, REGEX, b"", True, b"", False), GrammarCost(), deque())
    for each in (*many, new):
        turns.push(each, each)
    num_before = 0
    while (row := turns.pop()) is not new:
        assert row is not None
        turns.charge(row, SLOW_S / 4)
        turns.push(row, row)
        num_before += 1
    assert num_before == 30


def test_no_grammar_is_slow_for_good() -> None:
    cost = GrammarCost()
    cost.add(SLOW_S / 2, is_token=False)
    assert not cost.is_quick
    for _ in range(1000):
        cost.add(STEADY_S, is_token=True)
    assert cost.is_quick and cost.lately_s <= SLOW_S, "many requests are no reason to go last"
    cost.add(20 * SLOW_S, is_token=True)
    num_quick = 0
    while not cost.is_quick:
        cost.add(SLOW_S / 1000, is_token=True)
        num_quick += 1
    assert 20 < num_quick < 200


def test_grammars_whose_tokens_add_up_are_slow() -> None:
    cost, tokens, num_quick = GrammarCost(), (SLOW_S / 3, STEADY_S / 10), 0
    for count in range(10_000):
        cost.add(STEADY_S / 2 if count % 100 else SLOW_S / 2, is_token=True)
    assert cost.pace == "quick", "a token now and then is nothing"
    while cost.pace == "quick":
        cost.add(tokens[num_quick % 2], is_token=True)
        num_quick += 1
    assert num_quick * sum(tokens) / 2 < 2 * DEBT_S and cost.pace == "slow"


def test_a_quick_row_does_not_take_turns_with_rows_that_take_longer() -> None:
    """Forty take fifty times as long. It comes back while one of them is followed, and is next; they have a share."""
    turns = fair_turns()
    many, good = [quick_row(str(number), 0.005) for number in range(40)], quick_row("good", 0.0001)
    for each in (*many, good):
        turns.push(each, each)
    order: list[FollowedRow] = []
    while len(order) < 4000:
        row = turns.pop()
        assert row is not None
        turns.charge(row, row.cost.token_s or 0.0)
        if row is not good:
            turns.push(row, row)
        if good not in (row, *order[-1:]) and good not in turns:
            turns.push(good, good)
        order.append(row)
    between = "".join("g" if row is good else "m" for row in order[100:])
    assert "mmmmm" not in between and all(order.count(row) > 40 for row in many)
