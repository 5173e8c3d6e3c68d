"""A real server as a user starts it, and what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil


class Server:
    """`pypto-serving serve` in its own process; a context manager that asserts a clean end."""

    def __init__(
        self,
        *arguments: str | Path,
        wait: bool = True,
        port: int | None = 0,
        program: Sequence[str] = (sys.executable, "-m", "pypto_serving"),
    ) -> None:
        listening = () if port is None else ("--port", str(port))
        command = [*program, "serve", *map(str, arguments), *listening]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.ready: dict[str, Any] = {}
        self._family: list[psutil.Process] = []
        if wait:
            try:
                self.wait_ready()
            except BaseException:
                self.stop(signal.SIGKILL)
                raise

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the server ended with {self.process.wait()} before it was ready"
        self.ready = json.loads(line)

    @property
    def url(self) -> str:
        return str(self.ready["url"])

    @property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120)

    def family(self) -> list[psutil.Process]:
        """The API process, the engine core, the worker and its guide process, and readers."""
        api = psutil.Process(self.process.pid)
        return [api, *api.children(recursive=True)]

    def worker(self) -> psutil.Process:
        """The process that owns the device."""
        return next(p for p in self.family() if any(part.endswith("worker") for part in p.cmdline()))

    def metric(self, name: str) -> float:
        """Sum of a metric's samples at /metrics."""
        text = self.http.get("/metrics").text
        samples = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? ([0-9.e+-]+)$", text, re.MULTILINE)
        assert samples, f"no metric {name}"
        return sum(map(float, samples))

    def kill(self) -> None:
        """SIGKILL every process at once, as a host that goes down does; the death of one may end another first."""
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()

    def stop(self, signum: int = signal.SIGTERM, timeout_s: float = 40) -> int:
        """Signal the server, wait for its end, and assert that none of its processes is left."""
        self._family = self._family or (self.family() if self.process.poll() is None else [])
        if self.process.poll() is None:
            os.kill(self.process.pid, signum)
        code = self.process.wait(timeout_s)
        _, alive = psutil.wait_procs(self._family, timeout=5)
        assert not alive, f"left behind: {alive}"
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def complete(server: Server, prompt: list[int], max_tokens: int = 8) -> tuple[str, dict[str, Any]]:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    answer = server.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]["prompt_tokens_details"]
    return answer.json()["choices"][0]["text"], usage["cached_tokens_by_tier"]
