"""The port where another host joins, as strangers and that host see it."""

from __future__ import annotations

import contextlib
import hmac
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pypto_serving.backend.ranks.host_connections import CONTROL, HANDSHAKE_S, HandshakeError, Purpose, connect
from pypto_serving.backend.ranks.joining_host import REMINDED_S, Reminder
from pypto_serving.backend.ranks.serving_host import MAX_HANDSHAKES, HostListener, await_host
from pypto_serving.errors import ConfigError
from pypto_serving.types.start import SECRET_VARIABLE, read_secret
from tests.clock import VirtualClock
from tests.configs import make_config
from tests.store.pool import free_port
from tests.strangers import SAYINGS, strangers

SECRET = b"the secret of these two hosts"
LINKS = [Purpose(name, bytes(range(16))) for name in ("steps", "blocks", "exchange")]
LAST = Purpose("last")
PROTOCOL = b"pypto-serving hosts 1"
HEAD, MAC, NONCE = 85, 32, 32


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def arrived(address: str) -> Iterator[list[Purpose]]:
    """What those connected for who proved that they know the secret."""
    found: list[Purpose] = []
    listener = HostListener(address, SECRET)

    def let_in() -> None:
        for arrival in listener.arrivals(time.monotonic() + 60, lambda *_: None):
            found.append(arrival.purpose)
            arrival.end.close()
            if arrival.purpose == LAST:
                return

    thread = threading.Thread(target=let_in)
    thread.start()
    yield found
    join(address, LAST)
    thread.join()
    listener.close()


def join(address: str, *purposes: Purpose) -> None:
    for purpose in purposes:
        with connected(address, purpose) as end:
            assert read(end, 1) == b""


def connected(address: str, purpose: Purpose, tries: int = 3) -> socket.socket:
    """Connect; among very many strangers, a greeting may be ended in vain."""
    try:
        return connect(address, SECRET, purpose)
    except OSError:
        if tries == 1:
            raise
        return connected(address, purpose, tries - 1)


def stranger(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    end = socket.create_connection((host, int(port)), timeout=2 * HANDSHAKE_S)
    assert len(read(end, len(PROTOCOL) + NONCE)) == len(PROTOCOL) + NONCE
    return end


def read(end: socket.socket, size: int) -> bytes:
    """Read so many bytes, or all until the other side closes."""
    data = b""
    while len(data) < size and (more := end.recv(size - len(data))):
        data += more
    return data


@pytest.mark.parametrize("kind", SAYINGS)
def test_a_host_joins_past_many_strangers(address: str, arrived: list[Purpose], kind: str) -> None:
    with strangers(address, kind, 3 * MAX_HANDSHAKES):
        began_s = time.monotonic()
        join(address, CONTROL, *LINKS)
        assert time.monotonic() - began_s < HANDSHAKE_S
    assert arrived == [CONTROL, *LINKS]


def test_a_host_joins_once_descriptors_are_free_again(
    address: str, arrived: list[Purpose], caplog: pytest.LogCaptureFixture
) -> None:
    host, _, port = address.rpartition(":")
    ends = [socket.socket() for _ in range(4)]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, before[1]))
    try:
        for end in ends:
            end.connect((host, int(port)))
        began_s = time.monotonic()
        while "Too many open files" not in caplog.text:
            assert time.monotonic() - began_s < HANDSHAKE_S
            os.sched_yield()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    join(address, CONTROL, *LINKS)
    assert arrived == [CONTROL, *LINKS]
    for end in ends:
        end.close()


@pytest.mark.parametrize("pause_s", [None, 0.5], ids=["silent", "byte by byte"])
def test_who_is_slow_is_left(address: str, arrived: list[Purpose], pause_s: float | None) -> None:
    began_s = time.monotonic()
    with stranger(address) as end:
        end.settimeout(pause_s)
        while time.monotonic() - began_s < 2 * HANDSHAKE_S:
            try:
                if not end.recv(1):
                    break
            except TimeoutError:
                end.sendall(b"p")
            except ConnectionError:
                break
        assert HANDSHAKE_S - 1 < time.monotonic() - began_s < HANDSHAKE_S + 2
    join(address, CONTROL)


def test_who_knows_no_secret_is_told_so(address: str, arrived: list[Purpose]) -> None:
    with stranger(address) as end:
        end.sendall(os.urandom(HEAD + MAC))
        assert read(end, MAC + 1) == bytes(MAC)
    with pytest.raises(HandshakeError, match="the secrets differ; give both hosts the same"):
        connect(address, b"another secret of others", CONTROL)
    join(address, CONTROL)
    assert arrived == [CONTROL]


def test_a_greeting_cannot_be_said_again_or_sent_back(address: str, arrived: list[Purpose]) -> None:
    """Neither to the host that listens, nor to the one that joins."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        between = f"127.0.0.1:{listener.getsockname()[1]}"
        joining = threading.Thread(target=join_in_vain, args=(between,))
        joining.start()
        end, _ = listener.accept()
        with end, stranger(address) as other:
            end.sendall(PROTOCOL + os.urandom(NONCE))
            said = read(end, HEAD + MAC)
            other.sendall(said)
            assert read(other, MAC + 1) == bytes(MAC)
            end.sendall(said[-MAC:])
            assert read(end, 1) == b""
        joining.join()
    assert arrived == []


def join_in_vain(address: str) -> None:
    with pytest.raises(HandshakeError, match="the secrets differ"):
        join(address, CONTROL)


def test_a_host_of_another_version_is_refused(address: str, arrived: list[Purpose]) -> None:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=2 * HANDSHAKE_S) as end:
        nonce = read(end, len(PROTOCOL) + NONCE)[len(PROTOCOL) :]
        head = struct.pack("21s16s16s32s", b"pypto-serving hosts 9", b"control", bytes(16), bytes(NONCE))
        end.sendall(head + hmac.digest(SECRET, b"join" + nonce + head, "sha256"))
        assert read(end, 1) == b""
    assert arrived == []


@pytest.mark.parametrize(
    "banner", [b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n", b"220\r\n", b"pypto-serving hosts 9"]
)
def test_another_service_is_named_by_what_it_says(banner: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            end, _ = listener.accept()
            with end, contextlib.suppress(ConnectionError):
                end.sendall(banner)
                end.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(HandshakeError) as caught:
            connect(f"127.0.0.1:{listener.getsockname()[1]}", SECRET, CONTROL)
        thread.join()
    assert f"it answers {banner!r}, so it is not a serving host of this version" in str(caught.value)


def test_a_host_that_waits_says_so_each_minute() -> None:
    reminder = Reminder(clock := VirtualClock(100.0))
    due_s = []
    for _ in range(400):
        clock.advance(0.5)
        if reminder.due():
            due_s.append(clock.now() - 100.0)
    assert due_s == [REMINDED_S, 2 * REMINDED_S, 3 * REMINDED_S]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("", "hosts need a secret: set PYPTO_JOIN_SECRET or give the option join-secret-file; at least 16 bytes"),
        ("short", "the secret of hosts in PYPTO_JOIN_SECRET has 5 bytes, but must have at least 16"),
    ],
)
def test_a_secret_that_is_none(monkeypatch: pytest.MonkeyPatch, value: str, words: str) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, value)
    with pytest.raises(ConfigError) as caught:
        read_secret("")
    assert str(caught.value) == words


def test_a_secret_file_that_is_empty(tmp_path: Path) -> None:
    (file := tmp_path / "secret").write_text("\n")
    with pytest.raises(ConfigError, match=f"the secret of hosts in {file} has 0 bytes, but must have at least 16"):
        read_secret(str(file))


class ListeningError(Exception):
    """The port is open."""


def test_a_port_that_is_taken_is_open_later_where_a_host_joined_before(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first life ends at once: a user who mistyped is there to see it."""
    monkeypatch.setenv(SECRET_VARIABLE, SECRET.decode())
    config = make_config(
        model="", backend="cpu", dtype="", vocab_size=1, groups=(), num_blocks=(), max_model_len=1, join_address=address
    )
    name, _, port = address.rpartition(":")
    with socket.create_server((name, int(port))) as taken:

        def progress(phase: str, done: int, total: int) -> None:
            if taken.fileno() == -1:
                socket.create_connection((name, int(port))).close()
                raise ListeningError
            taken.close()

        with pytest.raises(ConfigError, match=f"{address} cannot be used for another host to join"):
            await_host(config, {}, progress)
        with pytest.raises(ListeningError):
            await_host(config, {}, progress, again=True)
