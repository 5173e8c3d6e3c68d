"""Who used the machine: CPU time and memory of process trees beside that of the whole machine, from /proc."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
CPUS = os.cpu_count() or 1
SETTLE_S = 0.5
"""What a process that goes on has to say for itself, before its parent goes on and asks."""
USER, NICE, SYSTEM, IDLE, IOWAIT, IRQ, SOFTIRQ, STEAL = range(8)


@dataclass(frozen=True)
class Stat:
    """One line of /proc/PID/stat: parent, session, and seconds of CPU time with those of ended children."""

    pid: int
    parent: int
    session: int
    cpu_s: float

    @staticmethod
    def parse(line: str) -> Stat:
        """The name, in brackets, may hold anything."""
        head, _, tail = line.rpartition(") ")
        fields = tail.split()
        cpu_s = sum(map(int, fields[11:15])) * TICK_S
        return Stat(int(head.split(" ", 1)[0]), int(fields[1]), int(fields[3]), cpu_s)


@dataclass(frozen=True)
class Sample:
    """Seconds: of the clock, and of CPU time since some start. `stolen_s` is what the host gave to others."""

    clock_s: float
    machine_s: float
    stolen_s: float
    server_s: float
    client_s: float
    own_s: float


@dataclass(frozen=True)
class Load:
    """Shares of the machine's CPU time in one interval; `foreign` is neither server nor client nor this program."""

    server: float
    client: float
    foreign: float
    stolen: float
    seconds: float

    @staticmethod
    def between(before: Sample, after: Sample, cpus: int = CPUS) -> Load:
        """What was used between two samples; clock ticks are coarse, so a share is never below 0."""
        seconds = after.clock_s - before.clock_s
        server, client, own, stolen, machine = (
            (getattr(after, name) - getattr(before, name)) / (seconds * cpus)
            for name in ("server_s", "client_s", "own_s", "stolen_s", "machine_s")
        )
        return Load(server, client, max(0.0, machine - server - client - own), stolen, seconds)


def machine_times(text: str) -> tuple[float, float]:
    """Seconds that all CPUs worked, and that the host took from them, of the text of /proc/stat."""
    values = [int(value) * TICK_S for value in text.split("\n", 1)[0].split()[1:9]]
    return sum(values) - values[IDLE] - values[IOWAIT] - values[STEAL], values[STEAL]


def sample(server: int) -> Sample:
    """Now. Clients are children that have ended; `server` is the first process of a tree."""
    machine_s, stolen_s = machine_times((PROC / "stat").read_text())
    client = resource.getrusage(resource.RUSAGE_CHILDREN)
    server_s = sum(stat.cpu_s for stat in tree(server))
    return Sample(
        time.monotonic(), machine_s, stolen_s, server_s, client.ru_utime + client.ru_stime, time.process_time()
    )


def tree(root: int) -> list[Stat]:
    """The processes that descend from `root`, or belong to its session, `root` included."""
    return descendants(root, _stats())


def descendants(root: int, stats: Iterable[Stat]) -> list[Stat]:
    """The same among `stats`."""
    by_pid = {stat.pid: stat for stat in stats}

    def belongs(stat: Stat | None) -> bool:
        while stat is not None:
            if root in (stat.pid, stat.session):
                return True
            stat = by_pid.get(stat.parent)
        return False

    return [stat for stat in by_pid.values() if belongs(stat)]


def generations(root: int, stats: Iterable[Stat]) -> list[list[int]]:
    """Ids of the processes of a tree, the root's generation first; who left its parent counts as the root's child."""
    by_pid = {stat.pid: stat for stat in descendants(root, stats)}

    def depth(pid: int) -> int:
        if pid == root:
            return 0
        return depth(by_pid[pid].parent) + 1 if by_pid[pid].parent in by_pid else 1

    found: dict[int, list[int]] = {}
    for pid in by_pid:
        found.setdefault(depth(pid), []).append(pid)
    return [found[level] for level in sorted(found)]


def pause(root: int) -> None:
    """Stop a whole tree, parents first."""
    for pids in generations(root, _stats()):
        _signal(pids, signal.SIGSTOP)


def resume(root: int) -> None:
    """Continue a whole tree, children first: a parent judges a child by when it last heard of it."""
    for pids in reversed(generations(root, _stats())):
        _signal(pids, signal.SIGCONT)
        time.sleep(SETTLE_S)


def kill(root: int) -> None:
    """End what is left of a tree."""
    _signal(pids(root), signal.SIGKILL)


def pids(root: int) -> set[int]:
    """Of the processes of a tree."""
    return {stat.pid for stat in tree(root)}


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    """Who is gone meanwhile is gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@dataclass(frozen=True)
class Memory:
    """Bytes of a tree: peaks summed, which counts shared pages twice, and what is resident now, each page once."""

    peak: int
    resident: int


def memory(root: int) -> Memory:
    """Of all processes of a tree: VmHWM and Pss."""
    pids = [stat.pid for stat in tree(root)]
    return Memory(
        sum(_kibibytes(pid, "status", "VmHWM:") for pid in pids) << 10,
        sum(_kibibytes(pid, "smaps_rollup", "Pss:") for pid in pids) << 10,
    )


def _kibibytes(pid: int, file: str, key: str) -> int:
    with contextlib.suppress(OSError):
        for line in (PROC / str(pid) / file).read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1])
    return 0


def _stats() -> Iterator[Stat]:
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                yield Stat.parse((folder / "stat").read_text())
