"""A host that joins: a process of the command line, and what it left behind."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from pypto_serving.engine.async_engine import AsyncEngine
from tests.e2e.ranks import RankKiller

SECRET = "the secret of these two hosts"
JOINED_S = 60


class JoiningHost:
    """Owns a process that joins `address`, perhaps in another place that `within` leads to."""

    def __init__(self, address: str, model: Path, within: Sequence[str] = (), secret: str = SECRET) -> None:
        command = [*within, sys.executable, "-P", "-m", "pypto_serving", "join", address, str(model), "--num-threads=1"]
        environment = os.environ | {"PYPTO_JOIN_SECRET": secret}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, **pipes)
        self.seen: list[psutil.Process] = []

    def joined(self) -> dict[str, Any]:
        """Wait until it has joined once more."""
        assert self.process.stdout is not None
        line: dict[str, Any] = json.loads(self.process.stdout.readline())
        self.seen += self.children()
        return line

    def children(self) -> list[psutil.Process]:
        """The processes of its present life: the one that leads, then its ranks."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def end(self) -> tuple[int, str]:
        """Ask it to end; return its exit code and what it wrote to stderr."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        return self.wait()

    def wait(self) -> tuple[int, str]:
        """Wait until it has ended."""
        _, errors = self.process.communicate(timeout=JOINED_S)
        return self.process.returncode, errors


@contextlib.contextmanager
def joining(*arguments: Any, **options: Any) -> Iterator[JoiningHost]:
    host = JoiningHost(*arguments, **options)
    try:
        yield host
    finally:
        host.seen += host.children()
        if host.process.poll() is None:
            print(host.end()[1])
        _, alive = psutil.wait_procs(host.seen, timeout=10)
        assert not alive, f"left behind: {alive}"


class HostKiller(RankKiller):
    """Kills any process of the group on either host."""

    def __init__(self, engine: AsyncEngine, count: int, seed: int, host: JoiningHost) -> None:
        super().__init__(engine, count, seed)
        self._host = host

    def group(self, leader: int) -> list[psutil.Process]:
        return [*super().group(leader), *self._host.children()]


class Nameserver:
    """Owns the DNS server at an address: it fails `failures` times, and then knows that all names are there."""

    within = ("sh", "-c", 'mount --bind "$0" /etc/resolv.conf && exec "$@"')
    """What comes before the file of `write` and a command that asks this server; in a mount namespace."""

    def __init__(self, address: str, failures: int) -> None:
        self._address, self.failures = address, failures
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((address, 53))
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def write(self, file: Path) -> str:
        file.write_text(f"nameserver {self._address}\noptions timeout:1 attempts:1\n")
        return str(file)

    def close(self) -> None:
        self._socket.sendto(b"", (self._address, 53))
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while (received := self._socket.recvfrom(512))[0]:
            self._socket.sendto(self._answer(received[0]), received[1])

    def _answer(self, query: bytes) -> bytes:
        """A message of RFC 1035: the header, the question, and an address where one was asked for."""
        end = query.index(b"\0", 12) + 5
        question = query[12:end]
        if self.failures:
            self.failures -= 1
            return query[:2] + struct.pack(">5H", 0x8182, 1, 0, 0, 0) + question
        if question[-4:] != struct.pack(">2H", 1, 1):
            return query[:2] + struct.pack(">5H", 0x8180, 1, 0, 0, 0) + question
        record = struct.pack(">3HIH4s", 0xC00C, 1, 1, 0, 4, socket.inet_aton(self._address))
        return query[:2] + struct.pack(">5H", 0x8180, 1, 1, 0, 0) + question + record


class Network:
    """Owns a network namespace, a host of its own at `theirs`, and the cable that leads there from `ours`."""

    ours, theirs = "10.213.7.1", "10.213.7.2"

    def __init__(self) -> None:
        """Raises OSError where the system does not let us."""
        self.name, self._end, self._far_end = (f"pypto{kind}{os.getpid()}" for kind in "nab")
        try:
            self._ip("netns", "add", self.name)
            self._ip("link", "add", self._end, "type", "veth", "peer", "name", self._far_end, "netns", self.name)
            self._ip("address", "add", f"{self.ours}/30", "dev", self._end)
            self._ip("link", "set", self._end, "up")
            self._within("address", "add", f"{self.theirs}/30", "dev", self._far_end)
            self.mend()
        except (OSError, subprocess.CalledProcessError) as error:
            self.remove()
            reason = "making network namespaces takes root and ip of the package iproute2"
            raise OSError(f"{reason}: {error}") from None

    def cut(self) -> None:
        self._within("link", "set", self._far_end, "down")

    def mend(self) -> None:
        self._within("link", "set", self._far_end, "up")

    def remove(self) -> None:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            self._ip("netns", "delete", self.name)

    @property
    def within(self) -> tuple[str, ...]:
        """What comes before a command that runs there."""
        return "ip", "netns", "exec", self.name

    def _within(self, *command: str) -> None:
        self._ip("-n", self.name, *command)

    def _ip(self, *command: str) -> None:
        subprocess.run(["ip", *command], check=True, capture_output=True)
