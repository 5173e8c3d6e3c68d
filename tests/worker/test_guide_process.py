"""The process that follows grammars: what it walls off, and that its death costs nothing."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from pypto_serving.types.arrays import pack_ids
from pypto_serving.types.guide import MAX_MATCHER_BYTES, Grammar, Guide
from pypto_serving.types.sampling import RowSampling
from pypto_serving.worker.guides import RowGuides, StepConstraints
from pypto_serving.worker.guiding.process import STUCK_S, GuideProcess
from pypto_serving.worker.guiding.wire import DropRow
from pypto_serving.worker.masks import RowMasks
from tests.checkpoints import NUM_BYTES, write_tokenizer
from tests.schemas import ambiguous_grammar

VOCAB_SIZE = 320
END = NUM_BYTES + 2
ROWS = 48
GOOD = Guide(Grammar("regex", "[a-m]{100}"))


class Rows:
    def __init__(self, model: Path) -> None:
        self.process, self.slow = (GuideProcess(str(model), VOCAB_SIZE, ROWS) for _ in range(2))
        self.masks = RowMasks(ROWS, VOCAB_SIZE)
        self.guides = RowGuides(iter((self.process, self.slow)).__next__, self.masks)
        self.outputs: dict[int, list[int]] = {}

    def start(self, row: int, guide: Guide, output: Sequence[int] = ()) -> None:
        self.outputs[row] = list(output)
        self.guides.start(row, RowSampling(guide=guide, eos_ids=pack_ids([END]), num_logprobs=0), output)

    def clear(self, row: int) -> None:
        self.guides.clear(row)
        del self.outputs[row]

    def constrain(self) -> StepConstraints:
        constraints = self.guides.constrain(np.array(list(self.outputs), np.int32))
        assert constraints is not None
        return constraints

    def step(self, rng: random.Random) -> dict[int, BaseException]:
        """Let each row that is ready append a token; return faults by row."""
        rows, constraints = list(self.outputs), self.constrain()
        counts, chosen = np.zeros(len(rows), np.int32), []
        for i, row in enumerate(rows):
            if i not in constraints.withheld and i not in constraints.faults:
                (at,) = self.masks.find(np.array([row], np.int32))
                bits = np.unpackbits(self.masks.bits[at].view(np.uint8), bitorder="little")
                chosen.append(rng.choice(np.flatnonzero(bits).tolist()))
                self.outputs[row].append(chosen[-1])
                counts[i] = 1
        self.guides.append(np.array(rows, np.int32), constraints, counts, np.array(chosen, np.int32))
        return {rows[i]: error for i, error in constraints.faults.items()}

    def child(self) -> psutil.Process:
        assert self.process.pid is not None
        return psutil.Process(self.process.pid)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


@pytest.fixture
def rows(model: Path) -> Iterator[Rows]:
    made = Rows(model)
    yield made
    made.guides.close()


def test_deaths_cost_nothing_and_no_process_is_left(rows: Rows) -> None:
    """Killed at any moment, also twice in a row and while it starts."""
    rng, kills, seen = random.Random(3), 0, set[int]()
    rows.start(1, GOOD)
    rows.start(5, GOOD, output=[64] * 30)
    while min(map(len, rows.outputs.values())) < 60:
        assert not rows.step(rng)
        if kills < 4 and rows.process.pid is not None and rng.random() < 0.1:
            seen.add(rows.process.pid)
            os.kill(rows.process.pid, signal.SIGKILL)
            kills += 1
    assert kills == 4
    letters = set(range(64, 64 + 13))
    assert all(letters.issuperset(output[:100]) for output in rows.outputs.values())
    seen.add(rows.child().pid)
    rows.guides.close()
    assert not any(map(psutil.pid_exists, seen))


def test_an_ambiguous_grammar_is_ended_alone(rows: Rows) -> None:
    """The process ends with it, once. A good row goes on, and the same grammar is refused when it comes again."""
    rng, hostile = random.Random(0), Guide(ambiguous_grammar(100))
    rows.start(0, GOOD)
    while not rows.outputs[0]:
        assert not rows.step(rng)
    pid = rows.process.pid
    rows.start(1, hostile, output=[*[15] * 3, 12])
    faults, seen = dict[int, BaseException](), {pid}
    while 1 not in faults:
        faults = rows.step(rng)
        assert 0 not in faults
        seen.add(rows.process.pid)
    assert "takes too long" in str(faults[1])
    assert not rows.guides._rows[0].num_crashes
    rows.clear(1)
    rows.start(2, hostile)
    assert rows.constrain().faults
    rows.clear(2)
    length = len(rows.outputs[0])
    while len(rows.outputs[0]) < length + 10:
        assert not rows.step(rng)
    assert len({*seen, rows.process.pid} - {None}) == 2


def test_no_token_waits_for_a_slow_grammar(rows: Rows) -> None:
    """Such grammars have a process of their own, which stands still until a good row has all its tokens."""
    rng, hostile = random.Random(0), Guide(ambiguous_grammar(30), compile_s=1.0)
    rows.start(0, GOOD)
    rows.start(1, hostile)
    assert rows.slow.pid is not None
    os.kill(rows.slow.pid, signal.SIGSTOP)
    rows.start(2, hostile)
    while len(rows.outputs[0]) < 100:
        assert not rows.step(rng)
    assert not rows.outputs[2]
    os.kill(rows.slow.pid, signal.SIGCONT)
    while not rows.outputs[2]:
        assert not rows.step(rng)


def test_memory_is_bounded_whatever_grammars_take(rows: Rows) -> None:
    """Schemas of 40 bytes that take 23 MB each: some wait for others, all are followed to their end.

    Rows stay until several take memory at once, however the test and the process share the machine.
    """
    rng, several = random.Random(0), 100 << 20
    rows.start(0, Guide(GOOD.grammar, compile_s=1.0))
    while not rows.outputs[0]:
        assert not rows.step(rng)
    assert rows.slow.pid is not None
    first = peak_bytes(rows.slow.pid)
    rows.clear(0)
    for row, number in enumerate(range(60_013, 60_013 + 2 * 16, 2)):
        rows.start(row, Guide(Grammar("json_schema", f'{{"type": "integer", "multipleOf": {number}}}'), compile_s=1.0))
    while rows.outputs:
        assert not rows.step(rng)
        most = peak_bytes(rows.slow.pid) - first
        enough = 3 if most > several else 300
        for row in [row for row, output in rows.outputs.items() if END in output or len(output) >= enough]:
            rows.clear(row)
    assert several < most < MAX_MATCHER_BYTES


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had, however late this is asked; it must be alive."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def test_steps_wait_while_no_process_may_start(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between processes that keep ending, rather than compute in vain."""
    rows.start(1, GOOD)
    while rows.constrain().withheld:
        pass
    assert rows.process.pid is not None
    os.kill(rows.process.pid, signal.SIGKILL)
    rows.process._num_mute = 5
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    while rows.process.pid is not None:
        rows.constrain()
    waits.clear()
    assert rows.constrain().withheld == {0} and sum(waits) > 0


def test_a_process_that_is_silent_is_ended_and_no_other(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one whose only row left before its answer, nor one that replays for long; one that stands still."""
    rng, ahead_s = random.Random(0), 0.0
    rows.start(1, GOOD)
    while not rows.outputs[1]:
        rows.step(rng)
    pid, shared = rows.process.pid, rows.process.shared
    assert pid is not None
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s, sleep=time.sleep)
    monkeypatch.setattr("pypto_serving.worker.guiding.process.time", clock)
    rows.start(2, GOOD)
    rows.clear(2)
    for _ in range(3):
        ahead_s += STUCK_S - 5
        num_heartbeats = int(shared.num_heartbeats[0])
        rows.process.send(DropRow(99))
        while int(shared.num_heartbeats[0]) == num_heartbeats:
            os.sched_yield()
        assert rows.process.death() is None
    os.kill(pid, signal.SIGSTOP)
    rows.process.death()
    ahead_s += STUCK_S + 1
    while rows.process.pid == pid:
        assert not rows.step(rng)
    while len(rows.outputs[1]) < 10:
        assert not rows.step(rng)


def test_only_deaths_for_no_row_are_held_against_the_process(rows: Rows) -> None:
    process, waited_s = rows.process, 0.001
    for life, mute in ((7, 0), (0, 1), (0, 2), (7, 2)):
        process.send(DropRow(1))
        while process.pid is None:
            assert process.receive(waited_s) is None
        process.shared.at_work[0] = life
        os.kill(process.pid, signal.SIGKILL)
        while (death := process.death()) is None:
            assert process.receive(waited_s) is None
        assert death == (life, signal.SIGKILL, mute)
        assert process.death() is None and process.shared.at_work[0] == 0
