"""Hostile clients end no process, take little memory, leave nothing behind and do not keep others from being served."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.server import Server, complete
from tests.soak.clean import SLACK_DESCRIPTORS, check_clean, role_of

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
GROWTH_BYTES = 500 << 20
ANSWER_S = 2.0


def besieged(server: Server, kind: str, seconds: float, seed: int) -> tuple[list[float], int]:
    """Latencies of one good request a second while hostile clients work, and the peak of the API's memory in bytes."""
    command = [sys.executable, "-m", "tests.soak.hostile", server.url, kind, str(seconds), str(seed)]
    api, latencies, peak = server.family()[0], [], 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as clients:
        while clients.poll() is None:
            began_s = time.monotonic()
            complete(server, [7, 8, 9], max_tokens=2)
            latencies.append(time.monotonic() - began_s)
            peak = max(peak, api.memory_info().rss)
            try:
                clients.wait(max(0.0, 1.0 - latencies[-1]))
            except subprocess.TimeoutExpired:
                continue
        assert clients.stdout is not None
        told = {int(status): count for status, count in json.load(clients.stdout).items()}
    print(f"{kind}: {dict(sorted(told.items()))}")
    assert 200 in told and 500 not in told, told
    return latencies, peak


def lasting(server: Server) -> dict[str, psutil.Process]:
    """The processes that no request may end; readers are started again."""
    return {role: process for process in server.family() if (role := role_of(process)) != "pypto_serving.api.reading"}


def withstand(kind: str, seconds: float, seed: int) -> list[float]:
    with Server("--max-num-seqs", "64", "--kv-memory", "32MiB", "--log-level", "error") as server:
        besieged(server, kind, 5, seed + 1)  # memory and files that are taken once
        processes = lasting(server)
        files = {role: process.num_fds() for role, process in processes.items()}
        start = processes["api"].memory_info().rss
        latencies, peak = besieged(server, kind, seconds, seed)
        worst_s, growth = max(latencies), peak - start
        print(f"{kind}: {len(latencies)} good requests, the slowest {worst_s:.2f} s, memory +{growth:,} bytes")
        assert lasting(server) == processes, "a process ended"
        assert growth < GROWTH_BYTES
        check_clean(server)
        for role, process in processes.items():
            assert process.num_fds() <= files[role] + SLACK_DESCRIPTORS, f"{role} leaks descriptors"
    return latencies


@pytest.mark.parametrize("kind", ["bytes", "requests"])
def test_hostile_clients_for_seconds(kind: str) -> None:
    withstand(kind, 8, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["bytes", "requests"])
def test_hostile_clients_for_twenty_minutes(kind: str) -> None:
    assert max(withstand(kind, 1200, seed=int(time.time()))) < ANSWER_S
