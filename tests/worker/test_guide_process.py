"""The process that follows grammars: what it walls off, and that its death costs nothing."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from pypto_serving.limits import MAX_MATCHER_BYTES, STUCK_S, TOKEN_S
from pypto_serving.types.arrays import pack_ids
from pypto_serving.types.guide import Grammar, Guide
from pypto_serving.types.sampling import RowSampling
from pypto_serving.util import Backoff
from pypto_serving.worker.guide_client import GuideProcess
from pypto_serving.worker.guides import RowGuides, StepConstraints
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
        self.process = GuideProcess(str(model), VOCAB_SIZE, ROWS)
        self.masks = RowMasks(ROWS, VOCAB_SIZE)
        self.guides = RowGuides(lambda: self.process, self.masks)
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

    def pids(self) -> list[int]:
        """The guide process, and its copy that follows rows, as far as they run."""
        if self.process.pid is None:
            return []
        return [self.process.pid, *(each.pid for each in psutil.Process(self.process.pid).children())]


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
    """Of the process or its copy, killed at any moment, also twice in a row and while it starts."""
    rng, kills, seen = random.Random(3), 0, set[int]()
    rows.start(1, GOOD)
    rows.start(5, GOOD, output=[64] * 30)
    while min(map(len, rows.outputs.values())) < 60:
        assert not rows.step(rng)
        if kills < 4 and (pids := rows.pids()) and rng.random() < 0.1:
            seen.update(pids)
            os.kill(pids[-1 if kills % 2 else 0], signal.SIGKILL)
            kills += 1
    assert kills == 4
    letters = set(range(64, 64 + 13))
    assert all(letters.issuperset(output[:100]) for output in rows.outputs.values())
    seen.update(rows.pids())
    rows.guides.close()
    while any(map(is_running, seen)):
        os.sched_yield()


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_an_ambiguous_grammar_is_ended_alone(rows: Rows) -> None:
    """A copy of the process ends with it, once. A good row goes on, and the grammar is refused when it comes again."""
    rng, hostile = random.Random(0), Guide(ambiguous_grammar(30))
    rows.start(0, GOOD)
    while not rows.outputs[0]:
        assert not rows.step(rng)
    pid, copy = rows.pids()
    rows.start(1, hostile, output=[*[15] * 3, 12])
    faults = dict[int, BaseException]()
    while 1 not in faults:
        faults = rows.step(rng)
        assert 0 not in faults
    assert "takes too long" in str(faults[1])
    assert not rows.guides._rows[0].num_crashes
    rows.clear(1)
    rows.start(2, hostile)
    assert rows.constrain().faults
    rows.clear(2)
    length = len(rows.outputs[0])
    while len(rows.outputs[0]) < length + 10:
        assert not rows.step(rng)
    assert rows.pids()[0] == pid and copy not in rows.pids()


def test_a_token_waits_for_no_hostile_one_by_more_than_its_limit(rows: Rows) -> None:
    """In CPU time: that of the process and its copies grows by no more than the limit, and by what replays take."""
    rng = random.Random(0)
    rows.start(0, GOOD)
    while len(rows.outputs[0]) < 50:
        assert not rows.step(rng)
    before_s = used_s(rows.pids())
    rows.start(1, Guide(ambiguous_grammar(30)), output=[*[15] * 3, 12])
    while 1 not in rows.step(rng):
        pass
    rows.clear(1)
    length = len(rows.outputs[0])
    while len(rows.outputs[0]) == length:
        assert not rows.step(rng)
    assert used_s(rows.pids()) - before_s < TOKEN_S + 0.5


def used_s(pids: list[int]) -> float:
    """The CPU time of a process, its copy, and the copies that ended."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(each.user + each.system for each in times) + times[0].children_user + times[0].children_system


def test_tokens_are_followed_while_a_grammar_compiles(rows: Rows) -> None:
    """This one takes a third of a second; a good row has all its tokens long before."""
    rng = random.Random(0)
    rows.start(0, GOOD)
    while not rows.outputs[0]:
        assert not rows.step(rng)
    rows.start(1, Guide(Grammar("json_schema", '{"type": "integer", "multipleOf": 99991}')))
    while not rows.outputs[1]:
        assert not rows.step(rng)
    assert len(rows.outputs[0]) > 20


def test_the_process_has_one_thread_and_ends_when_it_was_idle(rows: Rows) -> None:
    """Else it could make no copies. The next row starts another one."""
    rng = random.Random(0)
    rows.start(0, GOOD)
    while not rows.outputs[0]:
        assert not rows.step(rng)
    pid, copy = rows.pids()
    assert psutil.Process(pid).num_threads() == 1
    rows.clear(0)
    assert rows.process._channel is not None
    rows.process._channel.socket.shutdown(socket.SHUT_WR)  # as if it had been idle: it ends itself
    while is_running(pid):
        os.sched_yield()
    rows.start(0, GOOD)
    while not rows.outputs[0]:
        assert not rows.step(rng)
    assert not {pid, copy} & set(rows.pids()) and not psutil.pid_exists(pid)


def test_memory_is_bounded_whatever_grammars_take(rows: Rows) -> None:
    """Schemas of 40 bytes that take 23 MB each: some wait for others, all are followed to their end.

    Rows stay until several take memory at once, however the test and the process share the machine.
    """
    rng, several = random.Random(0), 100 << 20
    rows.start(0, GOOD)
    while not rows.outputs[0]:
        assert not rows.step(rng)
    _, copy = rows.pids()
    first = peak_bytes(copy)
    rows.clear(0)
    for row, number in enumerate(range(60_013, 60_013 + 2 * 16, 2)):
        rows.start(row, Guide(Grammar("json_schema", f'{{"type": "integer", "multipleOf": {number}}}')))
    while rows.outputs:
        assert not rows.step(rng)
        most = peak_bytes(copy) - first
        enough = 3 if most > several else 300
        for row in [row for row, output in rows.outputs.items() if END in output or len(output) >= enough]:
            rows.clear(row)
    assert several < most < MAX_MATCHER_BYTES


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had, however late this is asked; it must be alive."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def test_steps_wait_while_no_copy_may_start(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between copies that keep ending, later and later, rather than compute in vain. Messages are kept meanwhile."""
    rng, waits = random.Random(0), list[float]()
    rows.start(1, GOOD)
    while not rows.outputs[1]:
        rows.step(rng)
    for _ in range(4):
        rows.process._backoff.fail(0.0)
    while rows.process._channel is not None:
        if not rows.constrain().withheld and (pids := rows.pids()):
            os.kill(pids[-1], signal.SIGKILL)
    monkeypatch.setattr(time, "sleep", waits.append)
    rows.start(2, GOOD)
    assert rows.constrain().withheld == {0, 1} and sum(waits) > 0
    assert rows.process._channel is None
    rows.process._backoff = Backoff()
    while not rows.outputs[2]:
        assert not rows.step(rng)


def test_a_process_that_is_silent_is_ended_and_no_other(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one whose only row left before its answer, nor one that replays for long; one that stands still."""
    rng, ahead_s = random.Random(0), 0.0
    rows.start(1, GOOD)
    while not rows.outputs[1]:
        rows.step(rng)
    shared, (pid, copy) = rows.process.shared, rows.pids()
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s, sleep=time.sleep)
    monkeypatch.setattr("pypto_serving.worker.guide_client.time", clock)
    rows.start(2, GOOD)
    rows.clear(2)
    for _ in range(3):
        ahead_s += STUCK_S - 5
        num_heartbeats = int(shared.num_heartbeats[0])
        rows.process.send(DropRow(99))
        while int(shared.num_heartbeats[0]) == num_heartbeats:
            os.sched_yield()
        assert rows.process.death() is None
    os.kill(copy, signal.SIGSTOP)
    rows.process.death()
    ahead_s += STUCK_S + 1
    while rows.process.pid == pid:
        assert not rows.step(rng)
    while len(rows.outputs[1]) < 10:
        assert not rows.step(rng)
