"""Hostile clients end no process, take little memory, leave nothing behind and do not keep others from being served."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.server import Server, complete
from tests.soak.test_leaks import SLACK_DESCRIPTORS, check_clean, footprint

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
GROWTH_BYTES = 500 << 20
ANSWER_S = 2.0
KNOWN = {200, 204, 400, 404, 405, 408, 413, 414, 415, 417, 429, 431, 501, 503, 100}
"""Statuses that a client can be told; 500 is a defect."""


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
    assert 200 in told and told.keys() <= KNOWN, told
    return latencies, peak


def withstand(kind: str, seconds: float, seed: int) -> list[float]:
    with Server("--max-num-seqs", "64", "--kv-memory", "32MiB", "--log-level", "error") as server:
        besieged(server, kind, 5, seed + 1)  # memory that is taken once
        processes, before = server.family(), footprint(server)
        latencies, peak = besieged(server, kind, seconds, seed)
        worst_s = max(latencies)
        print(
            f"{kind}: {len(latencies)} good requests, the slowest {worst_s:.2f} s, peak +{peak - before[0][1]:,} bytes"
        )
        assert server.family() == processes, "a process ended"
        assert peak - before[0][1] < GROWTH_BYTES
        check_clean(server)
        for (role, _, fds), (_, _, fds_after) in zip(before, footprint(server), strict=True):
            assert fds_after <= fds + SLACK_DESCRIPTORS, f"{role} leaks descriptors"
    return latencies


@pytest.mark.parametrize("kind", ["bytes", "requests"])
def test_hostile_clients_for_seconds(kind: str) -> None:
    withstand(kind, 8, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["bytes", "requests"])
def test_hostile_clients_for_twenty_minutes(kind: str) -> None:
    assert max(withstand(kind, 1200, seed=int(time.time()))) < ANSWER_S
