"""Measure what connections cost that give no work: memory, and the latency of one good request each second.

    python benchmarks/connections.py            # from the repository's root

A server with the bundled model meets one kind of client at a time, then all at once, each kind in a process of its own:

- idle: IDLE connections that send nothing, and are opened again when the server closes them
- readers: READERS streams of about 1 MB, with log-probabilities, that are read at 64 bytes a second
- heads: HEADS connections that send a byte of a head every half second, and begin again after their 408
- flood: FLOODERS clients that open a connection, send a request or any beginning of one, and leave, without a pause

Memory is the largest resident size of the API process less that before, sampled four times a second.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import random
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

IDLE, READERS, HEADS, FLOODERS = 2000, 200, 500, 32
GOOD = json.dumps({"prompt": [1, 2, 3], "max_tokens": 8}).encode()
LONG = json.dumps({"prompt": [1], "max_tokens": 500, "ignore_eos": True, "stream": True, "logprobs": 20}).encode()
FIELDS = b"host: x\r\ncontent-type: application/json\r\n"
Client = Callable[[int, random.Random], Awaitable[None]]


def request(body: bytes) -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\n%bcontent-length: %d\r\n\r\n%b" % (FIELDS, len(body), body)


async def idle(port: int, rng: random.Random) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        await reader.read()
    finally:
        writer.close()


async def slow_reader(port: int, rng: random.Random) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    try:
        writer.write(request(LONG))
        while await reader.read(64):
            await asyncio.sleep(1)
    finally:
        writer.close()


async def slow_head(port: int, rng: random.Random) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        answer = asyncio.ensure_future(reader.read())
        for at in range(len(request(GOOD))):
            writer.write(request(GOOD)[at : at + 1])
            if (await asyncio.wait([answer], timeout=0.5))[0]:
                break
        await answer
    finally:
        writer.close()


async def flooder(port: int, rng: random.Random) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        whole = rng.random() < 0.5
        writer.write(request(GOOD) if whole else request(GOOD)[: rng.randrange(len(request(GOOD)))])
        await writer.drain()
        if whole and rng.random() < 0.5:
            await reader.read(1)
    finally:
        writer.close()


KINDS: dict[str, tuple[Client, int]] = {
    "idle": (idle, IDLE),
    "readers": (slow_reader, READERS),
    "heads": (slow_head, HEADS),
    "flood": (flooder, FLOODERS),
}


async def attack(kind: str, port: int) -> None:
    """Run all clients of a kind until this process is ended; each begins again when it is done."""
    one, count = KINDS[kind]

    async def go_on(rng: random.Random) -> None:
        while True:
            try:
                await one(port, rng)
            except OSError:
                await asyncio.sleep(0.1)

    await asyncio.gather(*(go_on(random.Random(i)) for i in range(count)))


@dataclass
class Watch:
    """What was seen of the server while it was attacked."""

    latencies: list[float] = field(default_factory=list)
    failed: int = 0
    peak_bytes: int = 0


def ask(port: int, watch: Watch) -> None:
    """Send one good request on a connection of its own."""
    started_s = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("POST", "/v1/completions", GOOD, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        watch.failed += answer.status != 200
    except OSError:
        watch.failed += 1
    finally:
        connection.close()
    watch.latencies.append(time.monotonic() - started_s)


def watch_for(port: int, api: psutil.Process, seconds: float) -> Watch:
    """Send a good request each second; meanwhile sample the memory."""
    watch, until_s = Watch(), time.monotonic() + seconds
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(0.25):
            watch.peak_bytes = max(watch.peak_bytes, api.memory_info().rss)

    sampler = threading.Thread(target=sample)
    sampler.start()
    while time.monotonic() < until_s:
        due_s = time.monotonic() + 1
        ask(port, watch)
        time.sleep(max(0.0, due_s - time.monotonic()))
    ended.set()
    sampler.join()
    return watch


def responses(port: int) -> dict[str, int]:
    """Return how many answers the server gave, by status."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    name = "pypto:http_responses_total{"
    found = [line for line in lines if line.startswith(name)]
    return {line.partition('status="')[2].partition('"')[0]: int(float(line.split()[-1])) for line in found}


@contextmanager
def started() -> Iterator[tuple[int, psutil.Process]]:
    """Start a server; yield its port and its API process."""
    command = [
        sys.executable,
        "-m",
        "pypto_serving",
        "serve",
        "--port",
        "0",
        "--log-level",
        "error",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())["port"], psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def measure(kinds: list[str], port: int, api: psutil.Process, seconds: float) -> str:
    """Attack with all `kinds` at once; return the row of the table."""
    before_bytes, before = api.memory_info().rss, responses(port)
    command = [sys.executable, str(Path(__file__))]
    attackers = [subprocess.Popen([*command, kind, str(port)]) for kind in kinds]
    try:
        watch = watch_for(port, api, seconds)
        open_now = len(api.net_connections(kind="tcp"))
    finally:
        for attacker in attackers:
            attacker.terminate()
            attacker.wait()
    told = {status: count - before.get(status, 0) for status, count in responses(port).items()}
    refused = ", ".join(f"{count} x {status}" for status, count in sorted(told.items()) if count and status >= "4")
    median, worst = statistics.median(watch.latencies), max(watch.latencies)
    grown = (watch.peak_bytes - before_bytes) / 1e6
    good = f"{len(watch.latencies) - watch.failed} of {len(watch.latencies)}"
    speed = f"{median * 1e3:.0f} / {worst * 1e3:.0f}"
    cells = (" + ".join(kinds) or "nobody", str(open_now), f"{grown:+.1f}", good, speed, refused or "none")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] in KINDS:
        with suppress(KeyboardInterrupt):
            asyncio.run(attack(sys.argv[1], int(sys.argv[2])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="of each kind")
    seconds = parser.parse_args().seconds
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 16_384) if hard != resource.RLIM_INFINITY else 16_384, hard))
    with started() as (port, api):
        watch_for(port, api, 3)
        start_bytes = api.memory_info().rss
        heads = ("clients", "connections", "API process, MB above before", "good requests", "ms, median / max")
        print("|", " | ".join(heads), "| other answers |\n|" + "---|" * (len(heads) + 1))
        for kinds in ([], *([kind] for kind in KINDS), list(KINDS)):
            print(measure(kinds, port, api, seconds), flush=True)
        watch_for(port, api, 12)
        left = (api.memory_info().rss - start_bytes) / 1e6
        print(f"\n{left:+.1f} MB are left, on {len(api.net_connections(kind='tcp'))} sockets.")


if __name__ == "__main__":
    main()
