"""Start, pause, resume and stop a server under test with its whole process tree."""

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

from pypto_serving.worker.ahead import AHEAD_TOKENS

START_S = 600.0
STOP_S = 60.0


class PeerError(Exception):
    """A system under test could not be installed or started, or its answer is wrong."""


@dataclass(frozen=True)
class Launch:
    """How to start a server: `arguments(port)` is the command line, `environment` is added to ours, `flags` are shown.

    A KV arena that is written at start has `kv_bytes`; one whose pages are allocated on first use has `kv_token_bytes`
    per token. `token_bytes` are those of the weights that a token reads. `text` marks a server that takes text prompts
    only, no token ids.
    """

    arguments: Callable[[int], Sequence[str]]
    flags: str
    kv_bytes: int = 0
    kv_token_bytes: int = 0
    token_bytes: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    text: bool = False
    model: str = ""


class Server:
    """One running server. Owns its processes. `kv_tokens` counts the tokens whose KV it has computed, each once."""

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
        """Return the id of the first process of the tree."""
        return self._process.pid

    def wait_ready(self) -> None:
        """Wait until /health returns 200 and a request for one token is answered. Raises PeerError."""
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
        """Return the body of a reply. Raises OSError for a status other than 200."""
        with urllib.request.urlopen(self.url + path, timeout=10) as reply:
            return bytes(reply.read())

    def ask(self, text: str, tokens: int) -> str:
        """Return the answer to a greedy request, not streamed. Raises OSError."""
        body = {"model": self.model(), "prompt": text, "max_tokens": tokens, "temperature": 0}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + "/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=START_S) as reply:
            return str(json.loads(reply.read())["choices"][0]["text"])

    def model(self) -> str:
        """Return the model name of requests: that of the launch, else the first one that the server lists."""
        return self.launch.model or str(json.loads(self.get("/v1/models"))["data"][0]["id"])

    @property
    def alive(self) -> bool:
        """Return whether the first process runs."""
        return self._process.poll() is None

    def pause(self) -> None:
        """Pause all processes, so that they use no CPU time."""
        self._stopped = True
        machine.pause(self.pid)
        self._pids = machine.pids(self.pid)

    def resume(self) -> None:
        """Continue all processes. Raises PeerError if some have ended; a server may start others."""
        if self._stopped:
            machine.resume(self.pid)
            self._stopped = False
            if not self._pids <= machine.pids(self.pid):
                raise PeerError(f"processes ended while they were stopped; see {self.log}")

    def memory(self) -> dict[str, int]:
        """Return bytes: summed peaks, resident now with each page once, and resident without keys and values.

        Of an arena allocated on first use, the bytes of `kv_tokens` and of those for which a worker takes memory ahead
        are subtracted, but at most the growth since the server was ready.
        """
        seen, used = machine.memory(self.pid), self.launch.kv_token_bytes * (self.kv_tokens + AHEAD_TOKENS)
        held = min(used, max(0, seen.resident - self._ready_bytes)) + self.launch.kv_bytes
        return {"peak": seen.peak, "resident": seen.resident, "without_kv": seen.resident - held}

    def close(self) -> None:
        """Terminate the tree; kill it if that takes too long."""
        with contextlib.suppress(PeerError):
            self.resume()
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        machine.kill(self.pid)
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


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
