"""`serve` under a service manager: readiness, signs of life, and sockets that it hands over, as real processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0
HANDED_OVER = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": sys.argv[2]}
os.execv(sys.executable, [sys.executable, "-m", "pypto_serving", "serve", "--backend", "null", *sys.argv[3:]])
"""
"""Hands a file descriptor over as systemd does: as number 3 of the process that it names."""


@contextmanager
def started(command: list[str], fd: int | None = None, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A server process; killed afterwards if it still runs."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    fds = () if fd is None else (fd,)
    with subprocess.Popen(command, **pipes, pass_fds=fds, cwd=ROOT, env=os.environ | environment) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def activated(given: socket.socket, *argv: str, count: str = "1") -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HANDED_OVER, str(given.fileno()), count, "--kv-memory", "1GiB", *argv]
    with started(command, given.fileno()) as process:
        yield process


def ready_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    found: dict[str, Any] = json.loads(process.stdout.readline() or "{}")
    return found


def stopped(process: subprocess.Popen[str]) -> str:
    """What the server said on stderr, once it ended as asked."""
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, said
    return said


@pytest.mark.parametrize("is_abstract", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_the_service_manager_is_told(tmp_path: Path, is_abstract: bool) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, socket.create_server(("127.0.0.1", 0)) as free:
        manager.bind(f"\0{path}" if is_abstract else str(path))
        manager.settimeout(WAIT_S)
        port = free.getsockname()[1]
        free.close()
        told = {"NOTIFY_SOCKET": f"@{path}" if is_abstract else str(path), "WATCHDOG_USEC": "200000"}
        command = [sys.executable, "-m", "pypto_serving", "serve", "--backend", "null", "--kv-memory", "1GiB"]
        with started([*command, "--port", str(port)], **told) as process:
            states = {manager.recv(100)}
            while b"READY=1" not in states:
                states.add(manager.recv(100))
            assert httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
            assert states <= {b"READY=1", b"WATCHDOG=1"}
            assert [manager.recv(100) for _ in range(5)] == [b"WATCHDOG=1"] * 5
            process.send_signal(signal.SIGTERM)
            while (state := manager.recv(100)) != b"STOPPING=1":
                assert state == b"WATCHDOG=1"
            assert process.wait(WAIT_S) == 0


def test_a_manager_that_is_gone_is_no_obstacle(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pypto_serving", "serve", "--backend", "null", "--port", "0"]
    with started(command, NOTIFY_SOCKET=str(tmp_path / "gone")) as process:
        assert ready_line(process)["event"] == "ready"
        assert "cannot be told READY=1" in stopped(process)


def test_a_port_of_the_service_manager() -> None:
    """Whoever connects before the server exists is served, and whoever does after it can wait for the next one."""
    with socket.create_server(("127.0.0.1", 0)) as given:
        address = given.getsockname()
        with socket.create_connection(address, timeout=WAIT_S) as early:
            early.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            with activated(given) as process:
                assert early.recv(1000).startswith(b"HTTP/1.1 200")
                ready = ready_line(process)
                url = f"http://127.0.0.1:{address[1]}"
                assert (ready["url"], ready["port"]) == (url, address[1])
                body = {"prompt": [5], "max_tokens": 3}
                assert httpx.post(url + "/v1/completions", json=body, timeout=WAIT_S).status_code == 200
                said = stopped(process)
                assert re.search(rf"port {address[1]} \(LISTEN_FDS\)", said)
        socket.create_connection(address, timeout=WAIT_S).close()


def test_a_unix_socket_of_the_service_manager_stays(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    with socket.socket(socket.AF_UNIX) as given:
        given.bind(str(path))
        given.listen()
        with activated(given) as process:
            assert ready_line(process)["uds"] == str(path)
            with httpx.Client(
                transport=httpx.HTTPTransport(uds=str(path)), base_url="http://x", timeout=WAIT_S
            ) as http:
                assert http.get("/ready").status_code == 200
            stopped(process)
        assert path.exists()


def test_a_port_that_is_open_to_others_is_warned_of() -> None:
    with socket.create_server(("0.0.0.0", 0)) as given, activated(given) as process:
        assert ready_line(process)["event"] == "ready"
        assert "LISTEN_FDS is 0.0.0.0 and there is no API key" in stopped(process)


@pytest.mark.parametrize(
    ("argv", "count", "told"),
    [
        (["--port", "8000"], "1", "--port and a socket of the service manager are both given; drop one"),
        ([], "2", "LISTEN_FDS is 2, but the service manager must hand over one socket"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], count: str, told: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as given, activated(given, *argv, count=count) as process:
        out, err = process.communicate(timeout=WAIT_S)
        assert (process.returncode, out, err) == (2, "", f"error: {told}\n")


def test_a_socket_that_takes_no_connections_is_refused() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as given, activated(given) as process:
        assert "give it a ListenStream" in process.communicate(timeout=WAIT_S)[1]
        assert process.returncode == 2


@pytest.mark.skipif(shutil.which("systemd-socket-activate") is None, reason="needs systemd-socket-activate (systemd)")
def test_systemd_hands_over_a_socket(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    command = [sys.executable, "-m", "pypto_serving", "serve", "--backend", "null", "--kv-memory", "1GiB"]
    with started(["systemd-socket-activate", "--listen", str(path), *command]) as process:
        assert process.stderr is not None and "Listening on" in process.stderr.readline()
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://x", timeout=WAIT_S) as http:
            assert http.get("/version").status_code == 200
        assert ready_line(process)["uds"] == str(path)
        stopped(process)
