"""Hostile clients end no process, take little memory, leave nothing behind and do not keep others from being served."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest

from tests.e2e.server import Server
from tests.soak.clean import SLACK_DESCRIPTORS, check_clean, role_of

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
GROWTH_BYTES = 500 << 20
EXPENDABLE = ("pypto_serving.api.reading", "pypto_serving.worker.guiding")
NUM_MUTATED = 20_000
ANSWER_S = 2.0
GUIDED_ANSWER_S = 6.0
"""A new grammar waits for those that the reader and the guide process compile just then, 2 s of CPU time each at most,
and until a copy of the latter has started anew."""
STREAM_GAP_S = 6.0
"""The same between two tokens of a stream with a grammar."""
QUESTION = [{"role": "user", "content": "What is 1+1?"}]
GOOD: dict[str, tuple[str, dict[str, Any], float]] = {
    "ids": ("/v1/completions", {"prompt": [7, 8, 9], "ignore_eos": True}, ANSWER_S),
    "chat": ("/v1/chat/completions", {"messages": QUESTION}, ANSWER_S),
    "guided": ("/v1/completions", {"prompt": [7, 8, 9], "max_tokens": 16}, GUIDED_ANSWER_S),
    "stream": ("/v1/completions", {"prompt": [7, 8, 9], "max_tokens": 100, "stream": True}, STREAM_GAP_S),
}
"""Good requests, and how long they may take, or a stream between two of its events. They come from the same host as the
hostile ones, as from behind a proxy."""


class Siege(NamedTuple):
    """What a siege did: requests sent, seconds of good requests by kind, peak bytes of processes by role."""

    num_sent: int
    latencies: dict[str, list[float]]
    peaks: dict[str, int]


def ask(client: httpx.Client, kind: str, number: int) -> float:
    """Send a good request and check its answer; return how long it took. Each guided one has a grammar of its own."""
    path, body, _ = GOOD[kind]
    choices = ["yes", f"no {number}"]
    given: dict[str, Any] = {"guided": {"guided_choice": choices}, "stream": {"guided_regex": f"{number}:[a-m]{{150}}"}}
    body = {"max_tokens": 2, "temperature": 0, **body, **given.get(kind, {})}
    if kind == "stream":
        return slowest_gap(client, path, body)
    began_s = time.monotonic()
    answer = client.post(path, json=body)
    assert answer.status_code == 200, f"{kind}: {answer.status_code} {answer.text}"
    assert kind != "guided" or answer.json()["choices"][0]["text"] in choices, answer.text
    return time.monotonic() - began_s


def slowest_gap(client: httpx.Client, path: str, body: dict[str, Any]) -> float:
    """Read a stream to its end; return the longest time until an event."""
    gaps, last_s, text = [0.0], time.monotonic(), ""
    with client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200, f"stream: {answer.status_code} {answer.read()!r}"
        for line in answer.iter_lines():
            gaps.append(time.monotonic() - last_s)
            last_s += gaps[-1]
            if line.startswith("data: {"):
                text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
    assert re.fullmatch(body["guided_regex"].replace("{150}", "{1,150}"), text), text
    return max(gaps)


def every_second(server: Server, kind: str, over: threading.Event) -> list[float]:
    """Ask once a second until it is `over`; how long each took."""
    latencies: list[float] = []
    with httpx.Client(base_url=server.url, timeout=120) as client:
        while not over.wait(max(0.0, 1.0 - (latencies or [0])[-1])) or not latencies:
            latencies.append(ask(client, kind, len(latencies)))
    return latencies


def besieged(server: Server, kind: str, seconds: float, seed: int) -> Siege:
    """Send good requests of each kind once a second while hostile clients work."""
    command = [sys.executable, "-m", "tests.soak.hostile", server.url, kind, str(seconds), str(seed)]
    processes, peaks = lasting(server), dict[str, int]()
    over = threading.Event()
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as clients,
        ThreadPoolExecutor(len(GOOD)) as pool,
    ):
        asked = {good: pool.submit(every_second, server, good, over) for good in GOOD}
        while clients.poll() is None:
            for role, process in processes.items():
                peaks[role] = max(peaks.get(role, 0), process.memory_info().rss)
            try:
                clients.wait(0.5)
            except subprocess.TimeoutExpired:
                continue
        over.set()
        assert clients.stdout is not None
        result = json.load(clients.stdout)
        latencies = {good: future.result() for good, future in asked.items()}
    told = {int(status): count for status, count in result["told"].items()}
    print(f"{kind}: {result['sent']} sent, told {dict(sorted(told.items()))}")
    assert 200 in told and 500 not in told, told
    return Siege(result["sent"], latencies, peaks)


def lasting(server: Server) -> dict[str, psutil.Process]:
    """The processes that no request may end. Those that read bodies and follow grammars are started again."""
    found: dict[str, psutil.Process] = {}
    for process in server.family():
        with suppress(psutil.NoSuchProcess):  # one that ends just now
            found[role_of(process)] = process
    return {role: process for role, process in found.items() if not role.startswith(EXPENDABLE)}


def withstand(kind: str, seconds: float, seed: int, slack: float = 1.0) -> Siege:
    options = ("--max-num-seqs", "64", "--kv-memory", "32MiB", "--trust-request-chat-template", "--log-level", "error")
    with Server(*options) as server:
        besieged(server, kind, min(5, seconds), seed + 1)  # memory and files that are taken once
        processes = lasting(server)
        files = {role: process.num_fds() for role, process in processes.items()}
        start = {role: process.memory_info().rss for role, process in processes.items()}
        siege = besieged(server, kind, seconds, seed)
        for good, latencies in siege.latencies.items():
            middle = sorted(latencies)[len(latencies) // 2]
            print(f"{kind}: {len(latencies)} of {good}, the median {middle:.3f} s, the slowest {max(latencies):.2f} s")
            assert max(latencies) < slack * GOOD[good][2], good
        growth = {role: peak - start.get(role, 0) for role, peak in siege.peaks.items()}
        print(f"{kind}: memory grew by {growth}")
        assert lasting(server) == processes, "a process ended"
        assert max(growth.values()) < GROWTH_BYTES
        check_clean(server)
        for role, process in processes.items():
            assert process.num_fds() <= files[role] + SLACK_DESCRIPTORS, f"{role} leaks descriptors"
    return siege


@pytest.mark.parametrize("kind", ["bytes", "requests"])
def test_hostile_clients_for_seconds(kind: str) -> None:
    """Other tests may use the CPUs meanwhile."""
    assert withstand(kind, 2, seed=1, slack=5).num_sent > 0


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["bytes", "requests"])
def test_hostile_clients_for_twenty_minutes(kind: str) -> None:
    assert withstand(kind, 1200, seed=int(time.time())).num_sent >= NUM_MUTATED
