"""Measure CPU time and memory of process trees and of the whole machine, from /proc."""

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
"""Time between continuing a process and continuing its parent, so that its heartbeat arrives first."""
USER, NICE, SYSTEM, IDLE, IOWAIT, IRQ, SOFTIRQ, STEAL = range(8)


@dataclass(frozen=True)
class Stat:
    """One line of /proc/PID/stat: parent, session, and seconds of CPU time, ended children included."""

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
    """Clock time and CPU times, in seconds. `stolen_s` is the time that the host gave to other machines."""

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
        """Return the load between two samples. Shares are at least 0, since clock ticks are coarse."""
        seconds = after.clock_s - before.clock_s
        server, client, own, stolen, machine = (
            (getattr(after, name) - getattr(before, name)) / (seconds * cpus)
            for name in ("server_s", "client_s", "own_s", "stolen_s", "machine_s")
        )
        return Load(server, client, max(0.0, machine - server - client - own), stolen, seconds)


def machine_times(text: str) -> tuple[float, float]:
    """Return busy and stolen seconds of all CPUs, from the text of /proc/stat."""
    values = [int(value) * TICK_S for value in text.split("\n", 1)[0].split()[1:9]]
    return sum(values) - values[IDLE] - values[IOWAIT] - values[STEAL], values[STEAL]


def sample(server: int) -> Sample:
    """Take a sample now. Clients are children that have ended; `server` is the first process of a tree."""
    machine_s, stolen_s = machine_times((PROC / "stat").read_text())
    client = resource.getrusage(resource.RUSAGE_CHILDREN)
    server_s = sum(stat.cpu_s for stat in tree(server))
    return Sample(
        time.monotonic(), machine_s, stolen_s, server_s, client.ru_utime + client.ru_stime, time.process_time()
    )


def tree(root: int) -> list[Stat]:
    """Return the processes that descend from `root` or belong to its session, `root` included."""
    return descendants(root, _stats())


def descendants(root: int, stats: Iterable[Stat]) -> list[Stat]:
    """Return the processes of `root`'s tree among `stats`."""
    by_pid = {stat.pid: stat for stat in stats}

    def belongs(stat: Stat | None) -> bool:
        while stat is not None:
            if root in (stat.pid, stat.session):
                return True
            stat = by_pid.get(stat.parent)
        return False

    return [stat for stat in by_pid.values() if belongs(stat)]


def generations(root: int, stats: Iterable[Stat]) -> list[list[int]]:
    """Return the ids of a tree's processes by generation, the root first. An orphan counts as the root's child."""
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
    """Continue a whole tree, children first, since a parent checks when it last heard from a child."""
    for pids in reversed(generations(root, _stats())):
        _signal(pids, signal.SIGCONT)
        time.sleep(SETTLE_S)


def kill(root: int) -> None:
    """Kill the remaining processes of a tree."""
    _signal(pids(root), signal.SIGKILL)


def pids(root: int) -> set[int]:
    """Return the ids of the processes of a tree."""
    return {stat.pid for stat in tree(root)}


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to processes. Ignore those that have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@dataclass(frozen=True)
class Memory:
    """Bytes of a tree: peaks summed, which counts shared pages twice, and what is resident now, each page once."""

    peak: int
    resident: int


def memory(root: int) -> Memory:
    """Sum VmHWM and Pss over all processes of a tree."""
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
