"""The guides of a worker's rows: what they allow in a step, and what follows when their process dies."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pypto_serving.guidance import Compiler, GrammarError, Matcher, content_key
from pypto_serving.limits import CPU_S, IDLE_S, MAX_MATCHER_BYTES, TOKEN_S
from pypto_serving.types.arrays import pack_ids
from pypto_serving.types.guide import Grammar, Guide, Reasoning
from pypto_serving.types.sampling import RowSampling
from pypto_serving.worker.guide_client import MAX_CRASHES, OWN_FAULTS, Death
from pypto_serving.worker.guides import PATIENCE_S, WAIT_SHARE, RowGuides, StepConstraints
from pypto_serving.worker.guiding.server import COMPILES_TOO_LONG, WAIT_S, CompileThread, FollowedRow, load_compiler
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
        self.process = InlineGuideProcess(str(model), VOCAB_SIZE, ROWS)
        self.masks = RowMasks(ROWS, VOCAB_SIZE)
        self.guides = RowGuides(lambda: self.process, self.masks)

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


def key_of(guide: Guide) -> int:
    assert guide.grammar is not None
    return content_key(guide.grammar)


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


def clock_of(ahead_s: Callable[[], float]) -> SimpleNamespace:
    """The module `time`, whose monotonic clock is ahead."""
    clock = SimpleNamespace(**vars(time))
    clock.monotonic = lambda: time.monotonic() + ahead_s()
    return clock


def test_memory_is_refused_to_those_who_ask_for_it(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row may take a quarter. Others wait while half is taken, and are refused after WAIT_S; those before go on."""
    ahead_s, memory = 0.0, rows.process.memory
    monkeypatch.setattr("pypto_serving.worker.guiding.server.time", clock_of(lambda: ahead_s))
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


def test_a_row_that_waited_for_its_turn_waits_for_memory_as_long(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that was short only for a moment ends no row, however long it waited before."""
    ahead_s, memory, server = 0.0, rows.process.memory, rows.process.server
    monkeypatch.setattr("pypto_serving.worker.guiding.server.time", clock_of(lambda: ahead_s))
    for row in (1, 2, 3):
        rows.start(row, OTHER)
        constraints = rows.ready(row)
        if row < 3:
            rows.append(constraints, [row], ids("a"))
            memory.num_bytes += MAX_MATCHER_BYTES // 5
            rows.ready(row)
    server._owed_s = 1.0
    rows.start(4, REGEX)
    rows.guides.append(np.array([3], np.int32), constraints, np.array([4], np.int32), np.array(ids("aaaa"), np.int32))
    server.turn(0.0)
    ahead_s = WAIT_S + 1
    memory.num_bytes += MAX_MATCHER_BYTES // 5
    server.turn(0.0)
    assert server._is_full
    assert rows.constrain(3, 4).withheld == {1} and not rows.constrain(3, 4).faults
    ahead_s += WAIT_S + 1
    assert {at: fault.status for at, fault in rows.ready(3, 4).faults.items()} == {1: 503}


def test_the_largest_row_ends_when_memory_is_short(rows: Rows) -> None:
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


def test_a_death_costs_no_row_anything(rows: Rows, model: Path) -> None:
    """Whatever the process was doing: the rows go on with the same choices."""
    alone, rng = Rows(model), random.Random(0)
    for each in (rows, alone):
        each.start(1, REGEX)
        each.start(2, REGEX, output=ids("ba"), num_logprobs=0)
    for _ in range(60):
        for _ in range(rng.randrange(3)):
            rows.process.deaths.append(Death(0, 0, signal.SIGKILL))
        constraints, right = rows.ready(1, 2), alone.ready(1, 2)
        assert constraints.forced == right.forced and not constraints.faults
        choices = [sorted(alone.allowed(row)) for row in (1, 2)]
        assert choices == [sorted(rows.allowed(row)) for row in (1, 2)]
        if right.forced:
            break
        if rng.random() < 0.5:  # between its answer and what the rows append
            rows.process.deaths.append(Death(0, 0, signal.SIGKILL))
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
    rows.process.deaths.append(Death(life, key_of(REGEX), ended_by))
    rows.append(rows.constrain(1, 2), [1, 2], ids("aa"))
    constraints = rows.ready(1, 2)
    assert constraints.faults.keys() == {0} and rows.allowed(2) == tokens("ab")
    assert (constraints.faults[0].status, constraints.faults[0].code) == (400, "invalid_grammar")
    rows.process.is_stuck = True
    rows.start(3, REGEX)
    assert rows.constrain(3).faults.keys() == {0}


def test_a_row_that_left_is_to_blame_as_well(rows: Rows) -> None:
    """Its grammar is refused when it comes again, and so are those of other rows that follow it."""
    rows.start(1, REGEX)
    rows.start(2, OTHER)
    constraints = rows.ready(1, 2)
    life = constraints.guides[0].life
    rows.append(constraints, [1, 2], ids("aa"))
    rows.guides.clear(1)
    rows.process.deaths.append(Death(life, key_of(REGEX), signal.SIGPROF))
    assert not rows.ready(2).faults
    rows.start(1, REGEX)
    assert rows.constrain(1).faults.keys() == {0}


def test_the_tokenizer_is_loaded_for_no_row(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """If that ends the process, no grammar is to blame."""
    lives, load = [], Compiler.of
    load_compiler.cache_clear()

    def loading(*args: Any) -> Compiler:
        lives.append(rows.process.shared.at_work.tolist())
        return load(*args)

    monkeypatch.setattr(Compiler, "of", loading)
    rows.start(1, REGEX)
    rows.ready(1)
    assert lives == [[[0, 0], [0, 0]]]


def test_a_row_is_given_up_when_processes_keep_ending_for_it(rows: Rows) -> None:
    rows.start(1, REGEX)
    rows.start(2, OTHER)
    for strikes in range(MAX_CRASHES):
        constraints = rows.ready(1, 2)
        assert not constraints.faults, strikes
        rows.process.deaths.append(Death(constraints.guides[0].life, key_of(REGEX), signal.SIGKILL))
        rows.append(constraints, [1, 2], ids("aa"))
    constraints = rows.ready(1, 2)
    assert constraints.faults.keys() == {0} and constraints.faults[0].status == 500


def test_rows_are_given_up_when_no_process_answers(rows: Rows) -> None:
    rows.start(1, REGEX)
    rows.start(2, BUDGET)
    rows.process.is_stuck = True
    for _ in range(MAX_CRASHES):
        assert not rows.constrain(1, 2).faults
        rows.process.deaths.append(Death(0, 0, 0))
    constraints = rows.constrain(1, 2)
    assert constraints.faults.keys() == {0, 1} and constraints.faults[0].status == 500


def test_a_choice_of_another_length_is_none(rows: Rows) -> None:
    """A process that starts over answers for what the row had; the row may have appended more since."""
    rows.start(1, Guide(Grammar("regex", "[ab][cd][ef]")))
    constraints = rows.ready(1)
    rows.process.deaths.append(Death(0, 0, signal.SIGKILL))
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
    ((i, fault),) = constraints.faults.items()
    assert fault.status == 500 and "index out of bounds" in str(fault)
    assert rows.allowed(1 if i else 2) == tokens("ab")


def test_a_grammar_that_only_the_tokenizer_refuses_is_a_fault(rows: Rows) -> None:
    rows.start(0, Guide(Grammar("lark", "start: <unheard_of>")))
    fault = rows.ready(0).faults[0]
    assert (fault.status, fault.code, fault.param) == (400, "invalid_grammar", "structured_outputs")
    assert str(fault).startswith("structured_outputs: ") and "unheard_of" in str(fault)


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


def test_rows_without_a_guide_wait_for_a_share_of_the_time(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many guides come late, and how often. Steps of only such rows wait for as long as a token takes."""
    now_s, waits = time.monotonic(), list[float]()

    def waiting(self: InlineGuideProcess, timeout_s: float) -> None:
        nonlocal now_s
        waits.append(timeout_s)
        now_s += timeout_s

    rows.start(1, REGEX)
    rows.start(2, OTHER)
    rows.ready(1, 2)
    clock = SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr("pypto_serving.worker.guides.time", clock)
    monkeypatch.setattr(InlineGuideProcess, "receive", waiting)
    for row in (1, 2):
        rows.guides._rows[row].choice = None
    began_s = now_s
    for _ in range(1000):
        assert rows.constrain(0, 1, 2).withheld == {1, 2}
        now_s += 0.02
    assert PATIENCE_S < sum(waits) < PATIENCE_S + WAIT_SHARE * (now_s - began_s) and max(waits) <= PATIENCE_S
    waits.clear()
    assert rows.constrain(1, 2).withheld == {0, 1}
    assert sum(waits) == pytest.approx(TOKEN_S)


class SlowCompiler:
    """Compiles nothing, until it is told to go on."""

    num_words = 10

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def compile(self, grammar: Grammar) -> Matcher:
        assert self.go_on.wait(60.0)
        raise GrammarError("slow")


def test_tokens_are_followed_while_a_grammar_compiles(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ended when it takes too long; meanwhile all growth of memory counts as its own."""
    rows.start(1, REGEX)
    rows.ready(1)
    compiler, server = SlowCompiler(), rows.process.server
    load, ended = server._load, list[int]()
    monkeypatch.setattr(server, "_load", lambda eos_ids: (compiler, load(eos_ids)[1]))
    monkeypatch.setattr(signal, "raise_signal", ended.append)
    rows.start(2, OTHER)
    for text in "abab":
        rows.append(rows.ready(1), [1], ids(text))
        rows.process.memory.num_bytes += 1000
    assert rows.constrain(1, 2).withheld == {1}
    assert rows.process.shared.at_work[1].tolist() == [rows.guides._rows[2].life, key_of(OTHER)]
    assert server._compiling.row is not None and not ended
    monkeypatch.setattr(CompileThread, "used_s", lambda self: 2 * CPU_S)
    server.turn(0.0)
    assert ended == [COMPILES_TOO_LONG]
    monkeypatch.setattr(CompileThread, "used_s", lambda self: 0.0)
    held_bytes = server._held_bytes
    compiler.go_on.set()
    assert rows.ready(1, 2).faults.keys() == {1}
    assert server._held_bytes == held_bytes and not rows.process.shared.at_work.any()


def test_grammars_compile_in_turns_with_tokens(rows: Rows) -> None:
    """And of the client that used the least time first."""
    server, compiled = rows.process.server, list[str]()
    start = server._start_compiling

    def starting(row: FollowedRow) -> None:
        compiled.append(row.source.guide.client)
        start(row)

    server._start_compiling = starting  # type: ignore[method-assign]
    for row, client in enumerate("aaab"):
        rows.start(row, Guide(REGEX.grammar, client=client), output=ids("abab"))
    server.turn(0.0)
    server._newcomers.charge("a", 1.0)
    server._owed_s = 1.0
    server.turn(0.0)
    assert compiled == ["a"], "the first row has its turn before"
    rows.ready(0, 1, 2, 3)
    assert compiled == ["a", "b", "a", "a"]


def test_a_process_is_idle_without_rows(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead_s = 0.0
    monkeypatch.setattr("pypto_serving.worker.guiding.server.time", clock_of(lambda: ahead_s))
    rows.start(1, REGEX)
    rows.ready(1)
    server = rows.process.server
    ahead_s = 2 * IDLE_S
    assert not server.has_been_idle(IDLE_S), "its row may have tokens any time"
    rows.guides.clear(1)
    server.turn(0.0)
    assert not server.has_been_idle(IDLE_S)
    ahead_s = 4 * IDLE_S
    assert server.has_been_idle(IDLE_S)
