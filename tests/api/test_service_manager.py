"""Signs of life for a watchdog: only while the engine core gives some, and only from the process that is asked."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import suppress
from pathlib import Path

import pytest

from pypto_serving.api.http.listening import PATIENCE_S, pet_watchdog, tell
from pypto_serving.engine.client import Health

SILENT, LOADING = Health(False, "silent"), Health(False, "loading")


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    """The socket of a service manager that waits 2 ms for a sign of life."""
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(tmp_path / "notify"))
    manager.setblocking(False)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", "2000")
    return manager


async def asked(states: list[Health]) -> None:
    """Pet the watchdog until it was asked for all `states` but the last, which stays."""
    left, done = list(states), asyncio.Event()

    def health() -> Health:
        if len(left) > 1:
            return left.pop(0)
        done.set()
        return left[0]

    petting = asyncio.create_task(pet_watchdog(health))
    await done.wait()
    petting.cancel()


def received(manager: socket.socket) -> list[bytes]:
    found = []
    while True:
        try:
            found.append(manager.recv(100))
        except BlockingIOError:
            return found


def test_signs_of_life_stop_while_the_core_is_silent(manager: socket.socket) -> None:
    asyncio.run(asked([LOADING, Health(True, "ready"), SILENT, Health(False, "dead"), SILENT, LOADING, SILENT]))
    assert received(manager) == [b"WATCHDOG=1"] * 3


def test_a_manager_that_reads_nothing_holds_up_nothing(
    manager: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, suppress(BlockingIOError):
        sender.connect(manager.getsockname())
        sender.setblocking(False)
        while True:
            sender.send(b"full")
    began_s = time.monotonic()
    asyncio.run(asked([LOADING, LOADING, LOADING, SILENT]))
    assert time.monotonic() - began_s < 2 * PATIENCE_S
    assert sum("cannot be told WATCHDOG=1" in record.message for record in caplog.records) == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [("WATCHDOG_PID", "1"), ("WATCHDOG_USEC", "0"), ("WATCHDOG_USEC", "x"), ("WATCHDOG_USEC", "9" * 400)],
)
def test_nobody_waits_for_signs_of_life(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    asyncio.run(pet_watchdog(lambda: LOADING))
    assert received(manager) == []


def test_without_a_service_manager_nothing_is_told(manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET")
    tell("READY=1")
    assert received(manager) == []
