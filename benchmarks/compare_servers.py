"""A server under test: started, asked until it answers, stopped and continued with its whole process tree."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import compare_machine as machine

START_S = 600.0
STOP_S = 60.0


class PeerError(Exception):
    """A system under test could not be installed or started, or answers wrongly."""


@dataclass(frozen=True)
class Launch:
    """How to start a server: `arguments(port)` is the command line, `environment` is added to ours, `flags` are shown.

    `kv_bytes` are filled with zeros at start to hold keys and values; an arena whose pages come as they are used
    takes `kv_token_bytes` for a token. `text` prompts go to a server that takes no token ids.
    """

    arguments: Callable[[int], Sequence[str]]
    flags: str
    kv_bytes: int = 0
    kv_token_bytes: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    text: bool = False
    model: str = ""


class Server:
    """One running server; owner of its processes. `kv_tokens`: whose keys and values it has computed, each once."""

    def __init__(self, launch: Launch, log: Path) -> None:
        self.launch, self.log = launch, log
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.ready_s = 0.0
        self.kv_tokens = 0
        self._ready_bytes = 0
        self._stopped = False
        self._pids: set[int] = set()
        log.parent.mkdir(parents=True, exist_ok=True)
        self._started_s = time.monotonic()
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [str(part) for part in launch.arguments(self.port)],
                env={**os.environ, **launch.environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of the first process of the tree."""
        return self._process.pid

    def wait_ready(self) -> None:
        """Return when /health says 200 and one token was answered; raises PeerError."""
        while time.monotonic() - self._started_s < START_S:
            if self._process.poll() is not None:
                raise PeerError(f"the server ended with status {self._process.returncode}; see {self.log}")
            with contextlib.suppress(OSError, ValueError):
                self.get("/health")
                self.ask("a", 1)
                self.ready_s = time.monotonic() - self._started_s
                self._ready_bytes = machine.memory(self.pid).resident
                return
            time.sleep(0.1)
        raise PeerError(f"the server was not ready within {START_S:.0f} s; see {self.log}")

    def get(self, path: str) -> bytes:
        """The body of a reply; raises OSError for another status than 200."""
        with urllib.request.urlopen(self.url + path, timeout=10) as reply:
            return bytes(reply.read())

    def ask(self, text: str, tokens: int) -> str:
        """The answer to a greedy request that is not streamed; raises OSError."""
        body = {"model": self.model(), "prompt": text, "max_tokens": tokens, "temperature": 0}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + "/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=START_S) as reply:
            return str(json.loads(reply.read())["choices"][0]["text"])

    def model(self) -> str:
        """The name to ask for: the first one that the server lists, unless its start says another."""
        return self.launch.model or str(json.loads(self.get("/v1/models"))["data"][0]["id"])

    @property
    def alive(self) -> bool:
        """Whether the first process runs."""
        return self._process.poll() is None

    def pause(self) -> None:
        """Stop all processes, so that they take no CPU time."""
        self._stopped = True
        self._pids = machine.pids(self.pid)
        machine.pause(self.pid)

    def resume(self) -> None:
        """Continue all processes; raises PeerError where they are not the same ones any more."""
        if self._stopped:
            machine.resume(self.pid)
            self._stopped = False
            if machine.pids(self.pid) != self._pids:
                raise PeerError(f"processes ended while they were stopped; see {self.log}")

    def memory(self) -> dict[str, int]:
        """Bytes: summed peaks, resident now with each page once, and of it what holds no keys and values.

        Of an arena whose pages come as they are used, those of `kv_tokens` are taken off, but no more than the server
        grew by since it was ready.
        """
        seen, used = machine.memory(self.pid), self.launch.kv_token_bytes * self.kv_tokens
        held = min(used, max(0, seen.resident - self._ready_bytes)) + self.launch.kv_bytes
        return {"peak": seen.peak, "resident": seen.resident, "without_kv": seen.resident - held}

    def close(self) -> None:
        """End the tree: asked first, killed if that takes too long."""
        with contextlib.suppress(PeerError):
            self.resume()
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        machine.kill(self.pid)
        self._process.wait()


@contextlib.contextmanager
def running(launch: Launch, log: Path) -> Iterator[Server]:
    """A server that is ready; it ends with the block."""
    server = Server(launch, log)
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
