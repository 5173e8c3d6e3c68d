"""Servers under test: start, ask, pause and resume them, and measure their CPU time and memory."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import psutil
from roofline_limits import BandwidthMemory

from pypto_serving.bench.client import ApiClient, find_model
from pypto_serving.bench.datasets import Prompt
from pypto_serving.bench.metrics import RequestRecord
from pypto_serving.bench.options import Target
from pypto_serving.bench.runner import send_all
from pypto_serving.errors import PyptoError
from pypto_serving.kernels import Engine
from pypto_serving.worker.loop import PREFAULT_TOKENS

PROGRAM = [sys.executable, "-m", "pypto_serving"]
CPUS = len(os.sched_getaffinity(0))
START_S, STOP_S = 600.0, 60.0
SETTLE_S = 0.5
"""Time between continuing a process and continuing its parent, so that its heartbeat arrives first."""
READ_BYTES = 256 << 20


class ServerError(Exception):
    """A server under test could not be installed or started, or its answer is wrong."""


class Relation(NamedTuple):
    """The parent and the session of a process."""

    parent: int
    session: int


def relations() -> dict[int, Relation]:
    """Return the relations of all processes by id."""
    found = {}
    for process in psutil.process_iter(["ppid"]):
        with contextlib.suppress(ProcessLookupError):
            found[process.pid] = Relation(process.info["ppid"], os.getsid(process.pid))
    return found


def generations(root: int, of: Mapping[int, Relation]) -> list[list[int]]:
    """Return the processes that descend from `root` or belong to its session, by generation, the root first.

    An orphan counts as the root's child.
    """
    depths = {root: 0}

    def depth(pid: int) -> int | None:
        if pid not in depths and pid in of:
            above = depth(of[pid].parent)
            if above is None and of[pid].session == root:
                above = 0
            if above is not None:
                depths[pid] = above + 1
        return depths.get(pid)

    for pid in of:
        depth(pid)
    levels = sorted(set(depths.values()))
    return [[pid for pid, own in depths.items() if own == level] for level in levels]


def processes(root: int) -> list[psutil.Process]:
    """Return the processes of a tree."""
    found = []
    for pid in itertools.chain.from_iterable(generations(root, relations())):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def pause(root: int) -> None:
    """Stop a whole tree, parents first."""
    for pids in generations(root, relations()):
        _signal(pids, signal.SIGSTOP)


def resume(root: int) -> None:
    """Continue a whole tree, children first, since a parent checks when it last heard from a child."""
    for pids in reversed(generations(root, relations())):
        _signal(pids, signal.SIGCONT)
        time.sleep(SETTLE_S)


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def tree_cpu_s(root: int) -> float:
    """Return the CPU seconds of a tree, ended children included."""
    total = 0.0
    for process in processes(root):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])
    return total


def memory_bytes(root: int) -> tuple[int, int]:
    """Return a tree's summed peaks, in which shared pages count twice, and what is resident now, each page once."""
    peak = resident = 0
    for process in processes(root):
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            resident += process.memory_full_info().pss
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak += int(status.partition("VmHWM:")[2].split()[0]) << 10
    return peak, resident


@dataclass(frozen=True)
class CpuSample:
    """Clock time and CPU times, in seconds: of the machine, of the server, of ended clients and of this program."""

    clock_s: float
    machine_s: float
    server_s: float
    client_s: float
    own_s: float

    @staticmethod
    def take(server: int) -> CpuSample:
        """Sample now. `server` is the first process of a tree."""
        machine, client = psutil.cpu_times(), resource.getrusage(resource.RUSAGE_CHILDREN)
        busy = machine.user + machine.nice + machine.system + machine.irq + machine.softirq
        client_s = client.ru_utime + client.ru_stime
        return CpuSample(time.monotonic(), busy, tree_cpu_s(server), client_s, time.process_time())

    def foreign_share(self, after: CpuSample, cpus: int = psutil.cpu_count() or 1) -> float:
        """Return the share of the machine's CPU time until `after` that other processes took."""
        known = sum(getattr(after, name) - getattr(self, name) for name in ("server_s", "client_s", "own_s"))
        return max(0.0, (after.machine_s - self.machine_s - known) / (after.clock_s - self.clock_s) / cpus)


class BandwidthReader:
    """Measures the read bandwidth that the machine has at the moment."""

    def __init__(self) -> None:
        self._engine, self._memory = Engine("", CPUS), BandwidthMemory(READ_BYTES)

    def bytes_per_s(self) -> float:
        """Measure the bandwidth."""
        return self._memory.bandwidth(self._engine)


class Request(NamedTuple):
    """A prompt, the tokens of its answer, and further fields of the body."""

    prompt: list[int] | str
    output: int
    fields: Mapping[str, Any] = {}


def ask_all(url: str, requests: Sequence[Request], at_once: int | None = None, **options: Any) -> list[RequestRecord]:
    """Send requests in order, at most `at_once` at a time; `options` are those of Target. Answers never end early.

    Raises ServerError if a request fails.
    """

    async def send() -> list[RequestRecord]:
        target = Target(base_url=url, **{"ignore_eos": True, **options})
        model = (await find_model(target)).id
        client = ApiClient(target, model)
        encoded = [
            ApiClient(dataclasses.replace(target, extra_body=each.fields), model).encode(
                Prompt(each.prompt, None, each.output)
            )
            for each in requests
        ]
        try:
            return await send_all(client.send, [(one, None) for one in encoded], np.zeros(len(encoded)), at_once)
        finally:
            client.close()

    records = asyncio.run(send())
    if errors := [record.error for record in records if record.error]:
        raise ServerError(f"a request failed: {errors[0]}")
    return records


def elapsed_s(records: Sequence[RequestRecord]) -> float:
    """Return the seconds from the first request to the last answer."""
    return max(record.start_s + record.latency_s for record in records) - min(record.start_s for record in records)


@contextlib.contextmanager
def served(command: Sequence[str], log: IO[str] | None = None) -> Iterator[dict[str, Any]]:
    """Run one of our `serve` commands on a free port; yield its ready line. The block may end the server.

    What it logs goes to `log`, if that is given.
    """
    words = [*command, "--port", "0", *([] if log else ["--log-level", "error"])]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log or subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise ServerError(f"{' '.join(command)} ended before it was ready; run it by itself")
            yield json.loads(line)
        finally:
            process.terminate()


@dataclass(frozen=True)
class Launch:
    """How to start a server: `arguments(port)` is the command line, `environment` is added to ours, `flags` are shown.

    A KV arena that is written at start has `kv_bytes`; one whose pages are allocated on first use has `kv_token_bytes`
    per token. `token_bytes` are those of the weights that a token reads.
    """

    arguments: Callable[[int], Sequence[str]]
    flags: str
    kv_bytes: int = 0
    kv_token_bytes: int = 0
    token_bytes: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)

    def with_flags(self, *flags: str, **environment: str) -> Launch:
        """Return this launch with more flags and environment variables."""
        return dataclasses.replace(
            self,
            arguments=lambda port: [*self.arguments(port), *flags],
            flags=" ".join((self.flags, *flags)),
            environment={**self.environment, **environment},
        )


class Server:
    """One running server. Owns its processes. `kv_tokens` counts the tokens whose KV it has computed, each once."""

    def __init__(self, launch: Launch, log: Path) -> None:
        self.launch, self.log = launch, log
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = int(listener.getsockname()[1])
        self.url = f"http://127.0.0.1:{port}"
        self.ready_s, self.kv_tokens = 0.0, 0
        self._ready_bytes, self._paused = 0, False
        log.parent.mkdir(parents=True, exist_ok=True)
        self._started_s = time.monotonic()
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [str(part) for part in launch.arguments(port)],
                env={**os.environ, **launch.environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def wait_ready(self) -> None:
        """Wait until /health returns 200 and a request for one token is answered. Raises ServerError."""
        while time.monotonic() - self._started_s < START_S:
            self.require_alive()
            with contextlib.suppress(OSError, PyptoError, ServerError):
                urllib.request.urlopen(self.url + "/health", timeout=10).close()
                self.ask("a", 1)
                self.ready_s = time.monotonic() - self._started_s
                self._ready_bytes = memory_bytes(self.pid)[1]
                return
            time.sleep(0.1)
        raise ServerError(f"the server was not ready within {START_S:.0f} s; see {self.log}")

    def require_alive(self) -> None:
        """Raise ServerError if the first process has ended."""
        if (status := self._process.poll()) is not None:
            raise ServerError(f"the server ended with status {status}; see {self.log}")

    def ask(self, text: str, tokens: int) -> str:
        """Return the answer to a greedy request, which may end early. Raises OSError or PyptoError."""
        return ask_all(self.url, [Request(text, tokens)], ignore_eos=False, stream=False)[0].text

    def pause(self) -> None:
        """Pause all processes, so that they use no CPU time."""
        self._paused = True
        pause(self.pid)

    def resume(self) -> None:
        """Continue all processes. Raises ServerError if the first one has ended."""
        if self._paused:
            resume(self.pid)
            self._paused = False
            self.require_alive()

    def memory(self) -> dict[str, int]:
        """Return bytes: summed peaks, resident now with each page once, and resident without keys and values.

        Of an arena allocated on first use, the bytes of `kv_tokens` and of those for which a worker takes memory ahead
        are subtracted, but at most the growth since the server was ready.
        """
        peak, resident = memory_bytes(self.pid)
        used = self.launch.kv_token_bytes * (self.kv_tokens + PREFAULT_TOKENS)
        held = min(used, max(0, resident - self._ready_bytes)) + self.launch.kv_bytes
        return {"peak": peak, "resident": resident, "without_kv": resident - held}

    def close(self) -> None:
        """Terminate the tree; kill it if that takes too long."""
        with contextlib.suppress(ServerError):
            self.resume()
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        for process in processes(self.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()


@contextlib.contextmanager
def running(launch: Launch, log: Path) -> Iterator[Server]:
    """Start a server and yield it when it is ready; stop it at the end."""
    server = Server(launch, log)
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()
