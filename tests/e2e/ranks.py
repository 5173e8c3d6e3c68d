"""Replicas of several ranks: the processes of the ranks that follow, and how they are killed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Collection
from pathlib import Path
from typing import Any

import psutil

from pypto_serving.backend.ranks import MODULE
from pypto_serving.engine.async_engine import AsyncEngine
from pypto_serving.parallel.topology import Topology
from pypto_serving.types.config import EngineConfig
from tests.e2e.engines import Killer, engine_config

ENDED_S = 10
"""Longest time that the processes of a dead leader may take to end."""


def rank_config(model: Path, topology: Topology, changes: dict[str, Any] | None = None, **options: Any) -> EngineConfig:
    """The configuration of a replica whose ranks compute on one thread each."""
    sizes = {f"{name}_parallel_size": getattr(topology, name) for name in ("tensor", "pipeline", "expert")}
    if topology.data > 1:
        sizes |= {"tensor_parallel_size": 1, "data_parallel_size": topology.data}
    return engine_config(model, changes, num_threads=topology.num_ranks, **sizes, **options)


def followers(leader: int) -> list[psutil.Process]:
    """The ranks that follow a leader, in order."""
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(leader).children()
        return sorted((child for child in children if follows(child)), key=lambda child: child.pid)
    return []


def follows(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return MODULE in process.cmdline()
    return False


def assert_ended(processes: Collection[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=ENDED_S)
    assert not alive, f"left behind: {alive}"


class RankKiller(Killer):
    """Kills any rank of the group instead, and remembers all of them."""

    def __init__(self, engine: AsyncEngine, count: int, seed: int, planned: Collection[int] = ()) -> None:
        super().__init__(engine, count, seed, planned)
        self.seen: list[psutil.Process] = []
        self.killed_ranks: set[int] = set()
        self._choice = random.Random(seed)

    def _kill(self, pid: int) -> None:
        group = [pid, *(rank.pid for rank in followers(pid))]
        self.seen += followers(pid)
        rank = self._choice.randrange(len(group))
        self.killed_ranks.add(rank)
        super()._kill(group[rank])


def stop(process: psutil.Process) -> None:
    os.kill(process.pid, signal.SIGSTOP)
