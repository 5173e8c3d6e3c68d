"""The guides of a worker's rows: what they allow in a step, and what follows when their process dies."""

from __future__ import annotations

import itertools
import random
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pypto_serving.guidance import Compiler, Matcher
from pypto_serving.types.arrays import pack_ids
from pypto_serving.types.guide import MAX_MATCHER_BYTES, Grammar, Guide, Reasoning
from pypto_serving.types.sampling import RowSampling
from pypto_serving.worker.guide_client import MAX_CRASHES, MAX_MUTE, OWN_FAULTS
from pypto_serving.worker.guides import RowGuides, StepConstraints
from pypto_serving.worker.guiding.followed_row import SLOW_S
from pypto_serving.worker.guiding.process import Death
from pypto_serving.worker.guiding.server import WAIT_S
from pypto_serving.worker.guiding.wire import GuideAnswers
from pypto_serving.worker.masks import RowMasks
from tests.checkpoints import NUM_BYTES, byte_ids, write_tokenizer
from tests.inline_guides import InlineGuideProcess

VOCAB_SIZE = 320
END = NUM_BYTES + 2
ROWS = 8
REGEX = Guide(Grammar("regex", "[ab]{2,40}(xyz|xyw)"))
OTHER = Guide(Grammar("regex", "(a|ab){4,40}c"))
BUDGET = Guide(None, Reasoning("", "bc", (), (), byte_ids("bc")), 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


class Rows:
    """Rows that are guided, and the process that follows them."""

    def __init__(self, model: Path) -> None:
        self.process, self.slow = (InlineGuideProcess(str(model), VOCAB_SIZE, ROWS) for _ in range(2))
        self.masks = RowMasks(ROWS, VOCAB_SIZE)
        self.guides = RowGuides(iter((self.process, self.slow)).__next__, self.masks)

    def start(self, row: int, guide: Guide, output: Sequence[int] = (), **changes: Any) -> None:
        self.guides.start(row, RowSampling(guide=guide, eos_ids=pack_ids([END]), **changes), output)

    def constrain(self, *rows: int) -> StepConstraints:
        constraints = self.guides.constrain(np.array(rows, np.int32))
        assert constraints is not None
        return constraints

    def ready(self, *rows: int) -> StepConstraints:
        """What guides tell once all are ready."""
        while (constraints := self.constrain(*rows)).withheld:
            pass
        return constraints

    def append(self, constraints: StepConstraints, rows: Sequence[int], tokens: Sequence[int]) -> None:
        self.guides.append(
            np.array(rows, np.int32), constraints, np.ones(len(rows), np.int32), np.array(tokens, np.int32)
        )

    def allowed(self, row: int) -> set[int]:
        (at,) = self.masks.find(np.array([row], np.int32))
        bits = np.unpackbits(self.masks.bits[at].view(np.uint8), bitorder="little")
        return set(np.flatnonzero(bits[:VOCAB_SIZE]).tolist()) if at >= 0 else set(range(VOCAB_SIZE))


@pytest.fixture
def rows(model: Path) -> Iterator[Rows]:
    made = Rows(model)
    yield made
    made.guides.close()


def ids(text: str) -> list[int]:
    """The tokens of printable text: the tokenizer has one for each byte, "!" first."""
    return [ord(char) - ord("!") for char in text]


def tokens(text: str) -> set[int]:
    return set(ids(text))


def test_a_row_without_a_grammar_has_a_budget(rows: Rows) -> None:
    """Of its tokens, which end the reasoning by their text; then nothing holds any more."""
    assert rows.guides.constrain(np.array([0, 1], np.int32)) is None
    rows.start(2, BUDGET, output=[5, 5])
    constraints = rows.ready(0, 2)
    assert constraints.guides.keys() == {1} and not constraints.forced
    rows.append(constraints, [0, 2], [7, 65])
    constraints = rows.ready(2)
    assert constraints.forced == {0: (66,)}
    rows.append(constraints, [2], [66])
    assert rows.ready(2).forced == {}
    assert rows.guides.constrain(np.array([2], np.int32)) is None


def test_a_row_that_is_not_ready_is_withheld_alone(rows: Rows) -> None:
    rows.process.is_stuck = True
    rows.start(1, REGEX)
    constraints = rows.constrain(0, 1)
    assert constraints.withheld == {1} and not constraints.faults and rows.allowed(1) == set(range(VOCAB_SIZE))
    rows.process.is_stuck = False
    constraints = rows.ready(0, 1)
    assert constraints.guides.keys() == {1} and rows.allowed(1) == tokens("ab")
    rows.append(constraints, [0, 1], [5, *ids("a")])
    assert rows.ready(1).guides[0].output == ids("a")
    rows.guides.clear(1)
    rows.guides.clear(2)
    assert rows.guides.constrain(np.array([0, 1], np.int32)) is None


def test_steps_wait_less_and_less_for_a_guide_that_comes_late(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    receive = InlineGuideProcess.receive

    def counting(self: InlineGuideProcess, timeout_s: float) -> GuideAnswers | None:
        waits.append(timeout_s)
        return receive(self, timeout_s)

    def is_waited_for() -> bool:
        """Append a token; return whether the next step, which gets no answer, waits for one."""
        rows.append(rows.ready(0, 1), [0, 1], [5, *ids("a")])
        waits.clear()
        rows.process.is_stuck = True
        assert rows.constrain(0, 1).withheld == {1}
        rows.process.is_stuck = False
        return any(waits)

    monkeypatch.setattr(InlineGuideProcess, "receive", counting)
    rows.start(1, Guide(Grammar("regex", "a{100}b|[ab]{100}c")))
    found = [is_waited_for() for _ in range(20)]
    assert [i for i, waited in enumerate(found) if waited] == [0, 2, 5, 10, 19]
    rows.guides.clear(1)
    rows.start(1, Guide(Grammar("regex", "a{100}c"), compile_s=SLOW_S))
    rows.process = rows.slow
    rows.slow.server.cost(Guide(Grammar("regex", "a{100}c"))).token_s = 1000 * SLOW_S
    assert not any(is_waited_for() for _ in range(20)), "a slow one"


def test_memory_is_refused_to_those_who_ask_for_it(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row may take a quarter. Others wait while half is taken, and are refused after WAIT_S; those before go on."""
    ahead_s, memory = 0.0, rows.process.memory
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s, process_time=time.process_time)
    monkeypatch.setattr("pypto_serving.worker.guiding.server.time", clock)
    for row in (1, 2, 3):
        rows.start(row, OTHER)
        constraints = rows.ready(row)
        rows.append(constraints, [row], ids("a"))
        memory.num_bytes += MAX_MATCHER_BYTES // 5
        assert not rows.ready(row).faults
    rows.start(4, REGEX)
    assert rows.constrain(4).withheld
    ahead_s = WAIT_S - 1
    assert rows.constrain(4).withheld and not rows.constrain(4).faults
    ahead_s = WAIT_S + 1
    fault = rows.ready(1, 2, 3, 4).faults
    assert fault.keys() == {3} and fault[3].status == 503
    rows.append(rows.ready(1), [1], ids("a"))
    memory.num_bytes += MAX_MATCHER_BYTES // 5
    constraints = rows.ready(1, 2, 3)
    assert (
        constraints.faults.keys() == {0}
        and constraints.faults[0].status == 400
        and "64 MiB" in str(constraints.faults[0])
    )


def test_the_newest_large_row_ends_when_memory_is_short(rows: Rows) -> None:
    for row in range(6):
        rows.start(row, OTHER)
        rows.ready(row)
    faults = {}
    for row in (5, 4, 0, 1, 2):
        rows.append(rows.ready(row), [row], ids("a"))
        rows.process.memory.num_bytes += MAX_MATCHER_BYTES // 4 - 1000
        constraints = rows.ready(*range(6))
        faults = {at: fault.status for at, fault in constraints.faults.items()}
    assert faults == {5: 503}


def test_a_row_may_take_so_much_cpu_time(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count(0.0, 0.5)
    clock = SimpleNamespace(monotonic=time.monotonic, process_time=seconds.__next__)
    monkeypatch.setattr("pypto_serving.worker.guiding.server.time", clock)
    rows.start(1, Guide(Grammar("regex", "[ab]{1000}")))
    num_tokens = 0
    while not (constraints := rows.ready(1)).faults:
        rows.append(constraints, [1], ids("a"))
        num_tokens += 1
    assert num_tokens == 7 and "takes too long to follow" in str(constraints.faults[0])


def test_a_death_costs_no_row_anything(rows: Rows, model: Path) -> None:
    """Whatever the process was doing: the rows go on with the same choices."""
    alone, rng = Rows(model), random.Random(0)
    for each in (rows, alone):
        each.start(1, REGEX)
        each.start(2, REGEX, output=ids("ba"), num_logprobs=0)
    for _ in range(60):
        for _ in range(rng.randrange(3)):
            rows.process.deaths.append(Death(0, signal.SIGKILL, 1))
        constraints, right = rows.ready(1, 2), alone.ready(1, 2)
        assert constraints.forced == right.forced and not constraints.faults
        choices = [sorted(alone.allowed(row)) for row in (1, 2)]
        assert choices == [sorted(rows.allowed(row)) for row in (1, 2)]
        if right.forced:
            break
        if rng.random() < 0.5:  # between its answer and what the rows append
            rows.process.deaths.append(Death(0, signal.SIGKILL, 1))
            assert rows.constrain(1).withheld == {0}
            rows.process.server.turn(0.0)
        appended = [rng.choice(each) for each in choices]
        rows.append(constraints, [1, 2], appended)
        alone.append(right, [1, 2], appended)
    assert right.forced


@pytest.mark.parametrize("ended_by", OWN_FAULTS)
def test_who_ended_the_process_is_refused_and_remembered(rows: Rows, ended_by: int) -> None:
    rows.start(1, REGEX)
    rows.start(2, OTHER)
    life = rows.ready(1, 2).guides[0].life
    rows.process.deaths.append(Death(life, ended_by, 1))
    rows.append(rows.constrain(1, 2), [1, 2], ids("aa"))
    constraints = rows.ready(1, 2)
    assert constraints.faults.keys() == {0} and rows.allowed(2) == tokens("ab")
    assert (constraints.faults[0].status, constraints.faults[0].error_code) == (400, "invalid_grammar")
    rows.process.is_stuck = True
    rows.start(3, REGEX)
    assert rows.constrain(3).faults.keys() == {0}


def test_a_row_that_left_is_to_blame_as_well(rows: Rows) -> None:
    """What its process found out while it left is remembered: that it ended it, or that it is slow."""
    rows.start(1, REGEX)
    rows.start(2, OTHER)
    constraints = rows.ready(1, 2)
    life = constraints.guides[0].life
    rows.append(constraints, [1, 2], ids("aa"))
    rows.guides.clear(1)
    rows.process.deaths.append(Death(life, signal.SIGPROF, 1))
    assert not rows.ready(2).faults
    rows.start(1, REGEX)
    assert rows.constrain(1).faults.keys() == {0}


def test_a_grammar_whose_row_left_while_it_was_slow_is_known(rows: Rows) -> None:
    rows.start(2, OTHER)
    rows.append(rows.ready(2), [2], ids("a"))
    rows.start(1, REGEX)
    server = rows.process.server
    server.cost(REGEX).token_s = 2 * SLOW_S
    while any(row.guide is None for row in server._rows.values()) or server.is_busy or len(server._rows) < 2:
        server.turn(0.0)
    rows.guides.clear(1)
    rows.ready(2)
    rows.start(1, REGEX)
    assert len(rows.slow.server._rows) == 0
    rows.ready(1)
    assert len(rows.slow.server._rows) == 1


def test_the_tokenizer_is_loaded_for_no_row(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """If that ends the process, no grammar is to blame."""
    lives, load = [], Compiler.of

    def loading(*args: Any) -> Compiler:
        lives.append(int(rows.process.shared.at_work[0]))
        return load(*args)

    monkeypatch.setattr(Compiler, "of", loading)
    rows.start(1, REGEX)
    rows.ready(1)
    assert lives == [0]


def test_a_row_is_given_up_when_processes_keep_ending_for_it(rows: Rows) -> None:
    rows.start(1, REGEX)
    rows.start(2, OTHER)
    for strikes in range(MAX_CRASHES):
        constraints = rows.ready(1, 2)
        assert not constraints.faults, strikes
        rows.process.deaths.append(Death(constraints.guides[0].life, signal.SIGKILL, 1))
        rows.append(constraints, [1, 2], ids("aa"))
    constraints = rows.ready(1, 2)
    assert constraints.faults.keys() == {0} and constraints.faults[0].status == 500


def test_rows_are_given_up_when_no_process_answers(rows: Rows) -> None:
    rows.start(1, REGEX)
    rows.start(2, BUDGET)
    rows.process.is_stuck = True
    for mute in range(1, MAX_MUTE + 1):
        assert not rows.constrain(1, 2).faults
        rows.process.deaths.append(Death(0, 0, mute))
    constraints = rows.constrain(1, 2)
    assert constraints.faults.keys() == {0, 1} and constraints.faults[0].status == 500


def test_a_choice_of_another_length_is_none(rows: Rows) -> None:
    """A process that starts over answers for what the row had; the row may have appended more since."""
    rows.start(1, Guide(Grammar("regex", "[ab][cd][ef]")))
    constraints = rows.ready(1)
    rows.process.deaths.append(Death(0, signal.SIGKILL, 1))
    assert rows.constrain(1).withheld == {0}
    rows.process.server.turn(0.0)
    rows.append(constraints, [1], ids("a"))
    assert not rows.ready(1).withheld and rows.allowed(1) == tokens("cd")


def test_a_panic_ends_its_row_alone(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        pass

    def panic(self: Matcher, token_id: int) -> None:
        monkeypatch.undo()
        raise Panic("index out of bounds")

    rows.start(1, REGEX)
    rows.start(2, REGEX)
    constraints = rows.ready(1, 2)
    monkeypatch.setattr(Matcher, "consume", panic)
    rows.append(constraints, [1, 2], ids("aa"))
    constraints = rows.ready(1, 2)
    assert (
        constraints.faults.keys() == {0}
        and constraints.faults[0].status == 500
        and "index out of bounds" in str(constraints.faults[0])
    )
    assert rows.allowed(2) == tokens("ab")


def test_a_grammar_that_only_the_tokenizer_refuses_is_a_fault(rows: Rows) -> None:
    rows.start(0, Guide(Grammar("lark", "start: <unheard_of>")))
    fault = rows.ready(0).faults[0]
    assert (fault.status, fault.error_code, fault.param) == (400, "invalid_grammar", "structured_outputs")
    assert str(fault).startswith("structured_outputs: ") and "unheard_of" in str(fault)


def test_rows_that_are_slow_move_to_another_process(rows: Rows, model: Path) -> None:
    """With the same choices, at once or behind a beginning that was quick; back when they have become quick."""
    alone, hard = Rows(model), Guide(REGEX.grammar, compile_s=SLOW_S)
    for each in (rows, alone):
        each.start(1, REGEX)
        each.start(2, OTHER)

    def num_slow() -> int:
        return len(rows.slow.server._rows)

    for text in ("aa", "bb", "ab", "ba"):
        if text == "bb":
            rows.process.server.cost(REGEX).add(2 * SLOW_S, is_token=True)
        for each in (rows, alone):
            each.append(each.ready(1, 2), [1, 2], ids(text))
        for each in (rows, alone):
            each.ready(1, 2)
        assert num_slow() == (text in ("ab", "ba"))
        assert [rows.allowed(row) for row in (1, 2)] == [alone.allowed(row) for row in (1, 2)]
    rows.start(3, REGEX)
    rows.start(4, hard)
    rows.ready(3, 4)
    assert num_slow() == 3
    rows.guides.clear(1)
    rows.start(1, REGEX)
    rows.ready(1)
    assert num_slow() == 2, "it was quick there"


def test_what_a_worker_measures_counts_more_than_what_the_api_did(rows: Rows) -> None:
    """A busy machine makes any grammar slow once."""
    for is_slow in (True, False):
        rows.start(1, Guide(REGEX.grammar, compile_s=SLOW_S))
        rows.append(rows.ready(1), [1], ids("a"))
        rows.ready(1)
        assert len(rows.process.server._rows) == (not is_slow)
        rows.guides.clear(1)


def test_rows_that_were_quick_come_first_in_a_new_process(rows: Rows) -> None:
    rows.start(1, REGEX)
    for _ in "aa":
        rows.append(rows.ready(1), [1], ids("a"))
    rows.process.deaths.append(Death(0, signal.SIGKILL, 1))
    rows.start(2, Guide(Grammar("regex", "a")))
    rows.process.is_stuck = True
    assert rows.constrain(1, 2).withheld == {0, 1}
    server = rows.process.server
    server.turn(0.0)
    server.turn(0.0)
    assert [(row.num_tokens, row.guide is None) for row in server._rows.values()] == [(1, False), (0, True)]


def test_work_of_rows_that_left_is_dropped(rows: Rows) -> None:
    rows.start(1, REGEX, output=ids("ab" * 10))
    rows.start(2, REGEX)
    server = rows.process.server
    server.turn(0.0)
    rows.guides.clear(1)
    turns = 0
    while server.is_busy:
        server.turn(0.0)
        turns += 1
    assert turns <= 2
