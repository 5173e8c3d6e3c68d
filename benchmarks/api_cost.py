"""Measure the API process's CPU time per streamed token, beside a bare uvicorn application that sends the same bytes.

    python benchmarks/api_cost.py            # from the repository's root

The API process is the real one; its engine core has a null worker that gives every stream a token each 20 ms. The bare
application is raw ASGI: it wakes as many streams at the same pace and sends each an event recorded from ours. Both run
under uvicorn with uvloop and httptools and stream to the same client, in alternating rounds. CPU time is that of all
threads of a process over the middle half of a round's events, divided by their number.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
import uvloop

from pypto_serving.api.run import serve
from pypto_serving.api.server import create_app
from pypto_serving.api.settings import load_serving_config
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.bench.http import HttpClient
from pypto_serving.engine.async_engine import AsyncEngine
from pypto_serving.model.null_models import plain_groups
from pypto_serving.processes import run_child
from pypto_serving.setup.locate import BUNDLED
from pypto_serving.types.config import CacheConfig, EngineConfig, ModelConfig, ServerConfig, WorkerConfig
from pypto_serving.types.server_url import parse_server_url
from pypto_serving.types.start import WorkerStart
from pypto_serving.types.step import BackendLimits, BackendTraits, StepPlan, StepResult
from pypto_serving.worker.__main__ import run as run_worker
from pypto_serving.worker.runner import PlanExecutor

PACE_S = 0.02
COMMAND = [sys.executable, "-m", "benchmarks.api_cost"]


class PacedRunner:
    """A runner whose steps end at least PACE_S apart."""

    def __init__(self, runner: PlanExecutor) -> None:
        self._runner, self._due_s = runner, 0.0

    @property
    def num_in_flight(self) -> int:
        return self._runner.num_in_flight

    @property
    def is_full(self) -> bool:
        return self._runner.is_full

    def submit_plan(self, plan: StepPlan) -> None:
        self._runner.submit_plan(plan)

    def collect_result(self) -> StepResult:
        result = self._runner.collect_result()
        self._due_s = max(self._due_s + PACE_S, time.monotonic())
        time.sleep(max(0.0, self._due_s - time.monotonic()))
        return result


async def serve_ours() -> None:
    """Run the API process and its engine."""
    vocab = Tokenizer.load(BUNDLED).raw.get_vocab_size()
    config = EngineConfig(
        model=ModelConfig(path="", dtype="bfloat16", vocab_size=vocab),
        worker=WorkerConfig(backend="null", worker_module="benchmarks.api_cost"),
        cache=CacheConfig(groups=plain_groups(16), num_blocks=(4096,) * len(plain_groups(16))),
        limits=BackendLimits(max_model_len=4096, depth=2, traits=BackendTraits(samples_on_device=True)),
    )
    engine = AsyncEngine(config)
    await engine.start()
    try:
        await engine.wait_ready()
        await serve(
            create_app(engine, load_serving_config(BUNDLED)),
            ServerConfig(served_model_names=("bundled",), port=0),
            announce,
        )
    finally:
        await engine.stop()


class Bare:
    """An ASGI application that sends `event` to every stream at each tick, as often as the request's body says."""

    def __init__(self, event: bytes) -> None:
        self._event = event
        self._wakes: set[asyncio.Event] = set()

    async def tick(self) -> None:
        while True:
            await asyncio.sleep(PACE_S)
            for wake in self._wakes:
                wake.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        count, wake = int((await receive())["body"]), asyncio.Event()
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._wakes.add(wake)
        for _ in range(count):
            await wake.wait()
            wake.clear()
            await send({"type": "http.response.body", "body": self._event, "more_body": True})
        self._wakes.discard(wake)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


async def serve_bare(event: bytes) -> None:
    app = Bare(event)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        ticking = asyncio.create_task(app.tick())
        config = uvicorn.Config(app, access_log=False, lifespan="off", log_config=None, server_header=False)
        announce(listener.getsockname()[1])
        await uvicorn.Server(config).serve(sockets=[listener])
        ticking.cancel()


def announce(port: int) -> None:
    print(port, flush=True)


@contextmanager
def started(*arguments: str) -> Iterator[tuple[int, HttpClient]]:
    """Start a server process; yield its id and a client."""
    process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.pid, HttpClient(parse_server_url(f"http://127.0.0.1:{int(process.stdout.readline())}"), {})
    finally:
        process.terminate()
        process.wait()


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


class Round:
    """The output of concurrent equal requests, with readings of the server's CPU time on the way."""

    def __init__(self, pid: int, expected: int) -> None:
        self.pieces: list[bytes] = []
        self.events = 0
        self._pid, self._expected = pid, expected
        self._marks: list[tuple[int, float]] = []

    def take(self, status: int, data: bytes) -> None:
        assert status == 200, data
        self.pieces.append(data)
        self.events += data.count(b"data: ")
        if len(self._marks) < 2 and self.events >= (0.25, 0.75)[len(self._marks)] * self._expected:
            self._marks.append((self.events, cpu_s(self._pid)))

    @property
    def us_per_event(self) -> float:
        """Return the CPU time per event over the middle half, when all requests are running."""
        (first, first_s), (last, last_s) = self._marks
        return (last_s - first_s) / (last - first) * 1e6


async def stream(pid: int, client: HttpClient, body: bytes, streams: int, tokens: int) -> Round:
    request, taken = client.encode("POST", "/v1/completions", body), Round(pid, streams * tokens)
    await asyncio.gather(*(client.exchange(request, taken.take) for _ in range(streams)))
    return taken


async def compare(streams: int, tokens: int, rounds: int) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    ours_body = msgspec.json.encode(body)
    with started("ours") as (our_pid, ours):
        pieces = (await stream(our_pid, ours, ours_body, 1, tokens)).pieces
        event = sorted(pieces[1:-1], key=len)[len(pieces) // 2]
        with started("bare", event.hex()) as (bare_pid, bare):
            results: list[tuple[float, ...]] = []
            for _ in range(rounds):
                mine = await stream(our_pid, ours, ours_body, streams, tokens)
                theirs = await stream(bare_pid, bare, str(tokens).encode(), streams, tokens)
                costs = mine.us_per_event, theirs.us_per_event
                events = (taken.events / len(taken.pieces) for taken in (mine, theirs))
                results.append((*costs, costs[0] / costs[1], *events))
        print(f"{streams} streams of {tokens} tokens, events of {len(event)} bytes, medians of {rounds} rounds\n")
    mine, theirs, ratio, our_events, their_events = map(statistics.median, zip(*results, strict=True))
    print("| | CPU us per token | events per write |\n|---|---|---|")
    print(f"| pypto-serving | {mine:.1f} | {our_events:.2f} |")
    print(f"| bare uvicorn | {theirs:.1f} | {their_events:.2f} |")
    print(f"| ratio | {ratio:.2f} | |")


def main() -> None:
    if len(sys.argv) == 2 and sys.argv[1].isdigit():
        sys.exit(run_child(lambda parent: run_worker(parent, PacedRunner), WorkerStart))
    if sys.argv[1:2] == ["ours"]:
        return uvloop.run(serve_ours())
    if sys.argv[1:2] == ["bare"]:
        return uvloop.run(serve_bare(bytes.fromhex(sys.argv[2])))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    uvloop.run(compare(arguments.streams, arguments.tokens, arguments.rounds))


if __name__ == "__main__":
    main()
