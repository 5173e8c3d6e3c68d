"""The serving host's side of a replica over two hosts: wait for the other host, and take its connections."""

from __future__ import annotations

import importlib.metadata
import logging
import random
import secrets
import select
import socket
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pypto_serving.backend.base import Progress
from pypto_serving.backend.ranks.host_connections import (
    CONTROL,
    HANDSHAKE_S,
    LATE,
    LIFE_BYTES,
    ControlConnection,
    DamageError,
    Handshake,
    HandshakeError,
    HostChannel,
    Purpose,
    listen,
)
from pypto_serving.errors import EXIT_USAGE, ConfigError, EngineDeadError
from pypto_serving.kernels.abi import library
from pypto_serving.processes import ChildFault
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.start import HostHello, HostStart, read_secret
from pypto_serving.util import counted

log = logging.getLogger(__name__)

WAITING = "waiting for another host"
MAX_HANDSHAKES = 128
"""Limit of concurrent handshakes."""
PROGRESS_S, AGAIN_S, LOGGED_S = 0.5, 0.1, 10.0


def program_version() -> str:
    """Return the version of this program and its kernels, equal on both hosts so that they compute the same bits."""
    lib = library()
    assert lib is not None
    return f"{importlib.metadata.version('pypto-serving')} ({lib.sources()[:8]})"


class JoinedHost(NamedTuple):
    """The other host: its control connection, and the file descriptors of its other connections, by name."""

    name: str
    control: ControlConnection
    links: Mapping[str, int]


class Arrival(NamedTuple):
    """A connection whose other side has proved that it knows the secret."""

    purpose: Purpose
    end: socket.socket
    name: str


def await_host(config: EngineConfig, files: Mapping[str, bytes], progress: Progress, again: bool = False) -> JoinedHost:
    """Wait for another host whose checkpoint has `files`, given as digests by name; then stop listening.

    Wait for the limit of a step, less the silence after which a host counts as gone. Raises EngineDeadError if no host
    joins, and ConfigError if the address cannot be used: at once, or if a host is to join `again`, after the wait,
    since the address may be missing while the network is down.
    """
    faults = config.faults
    waiting_s = max(HANDSHAKE_S, faults.step_timeout_s - faults.silent_s)
    deadline_s, address = time.monotonic() + waiting_s, config.parallel.join_address
    listener = _open(address, read_secret(config.parallel.join_secret_file), deadline_s if again else 0.0, progress)
    log.info("another host may join at %s within %.0f s", address, waiting_s)
    try:
        for arrival in listener.arrivals(deadline_s, progress):
            if arrival.purpose == CONTROL and (joined := _let_in(config, arrival, listener, files)):
                return joined
            arrival.end.close()
    finally:
        listener.close()
    raise EngineDeadError(
        f"no host joined at {address} within {waiting_s:.0f} s; run `pypto-serving join {address}` there"
    )


def _open(address: str, secret: bytes, deadline_s: float, progress: Progress) -> HostListener:
    """Listen as soon as the address can be used. Raises ConfigError if it still cannot at the deadline."""
    logged = False
    while True:
        try:
            return HostListener(address, secret)
        except ConfigError as error:
            if time.monotonic() >= deadline_s:
                raise
            if not logged:
                log.warning("%s; trying again", error)
            logged = True
        progress(f"{WAITING} at {address}", 0, 1)
        time.sleep(AGAIN_S)


def _let_in(
    config: EngineConfig, arrival: Arrival, listener: HostListener, files: Mapping[str, bytes]
) -> JoinedHost | None:
    """Accept the connections of a host that can join; send others the reason, and return None."""
    channel = HostChannel(arrival.end)
    try:
        hello = channel.receive(HANDSHAKE_S)
    except DamageError as error:
        log.warning("%s %s", arrival.name, error)
        return None
    if not isinstance(hello, HostHello):
        return None
    if problem := _refusal(config, hello, files):
        log.warning("%s cannot join: %s", arrival.name, problem)
        channel.send(ChildFault(problem, EXIT_USAGE))
        channel.close(linger_s=HANDSHAKE_S)
        return None
    life = secrets.token_bytes(LIFE_BYTES)
    channel.send(HostStart(config, life))
    wanted, found = set(config.parallel.topology.connections), dict[str, socket.socket]()
    for other in listener.arrivals(time.monotonic() + HANDSHAKE_S, lambda *_: None):
        name, its_life = other.purpose
        if its_life == life and name in wanted - found.keys():
            found[name] = other.end
        else:
            other.end.close()
        if found.keys() == wanted:
            links = {name: end.detach() for name, end in found.items()}
            return JoinedHost(f"host {hello.name} at {arrival.name}", ControlConnection(channel, config.faults), links)
    for end in found.values():
        end.close()
    return None


def _refusal(config: EngineConfig, hello: HostHello, files: Mapping[str, bytes]) -> str:
    """Return why a host cannot join, worded for the users of both hosts; "" if it can."""
    if hello.version != (version := program_version()):
        return f"the serving host runs pypto-serving {version}, and the other {hello.version}; install the same"
    both = hello.files.keys() | files.keys()
    if odd := sorted(name for name in both if hello.files.get(name) != files.get(name)):
        more = f" and {counted(len(odd) - 1, 'other file')}" if odd[1:] else ""
        return (
            f"the serving host serves another model: {odd[0]}{more} of {config.model.path} there "
            f"{'differ' if more else 'differs'}; give both hosts the same files"
        )
    return ""


class HostListener:
    """Owns the listening socket for the other host, and the connections whose handshake is not complete.

    Above MAX_HANDSHAKES, it closes a random one. This rarely hits the other host, which completes its own at once.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        self.address, self._secret = address, secret
        try:
            self._listener = listen(address)
        except OSError as error:
            raise ConfigError(f"{address} cannot be used for another host to join: {error.strerror}") from None
        self._listener.setblocking(False)
        self._poller = select.poll()
        self._poller.register(self._listener, select.POLLIN)
        self._handshakes: dict[int, Handshake] = {}
        self._arrived: deque[Arrival] = deque()
        self._logged_s: dict[str, float] = {}

    def arrivals(self, deadline_s: float, progress: Progress) -> Iterable[Arrival]:
        """Yield connections as they arrive, until the deadline."""
        while (left_s := deadline_s - time.monotonic()) > 0:
            progress(f"{WAITING} at {self.address}", 0, 1)
            if self._arrived:
                yield self._arrived.popleft()
            else:
                self._serve_handshakes(min(PROGRESS_S, left_s))

    def _serve_handshakes(self, timeout_s: float) -> None:
        """Accept new connections, and continue the handshakes of others."""
        ready = {fd for fd, _ in self._poller.poll(timeout_s * 1000)}
        for fd in ready & self._handshakes.keys():
            self._read(fd)
        if self._listener.fileno() in ready:
            self._accept()
        now_s = time.monotonic()
        for fd in [fd for fd, handshake in self._handshakes.items() if handshake.deadline_s < now_s]:
            self._refuse(fd, LATE)

    def _accept(self) -> None:
        if len(self._handshakes) == MAX_HANDSHAKES:
            self._refuse(random.choice(list(self._handshakes)), "too many others came")
        try:
            end, peer = self._listener.accept()
        except OSError as error:
            self._log("a connection", str(error))
            time.sleep(AGAIN_S)
            return
        try:
            self._handshakes[end.fileno()] = Handshake(end, f"{peer[0]}:{peer[1]}")
        except OSError:
            end.close()  # the other side is gone already
        else:
            self._poller.register(end, select.POLLIN)

    def _read(self, fd: int) -> None:
        handshake = self._handshakes[fd]
        try:
            purpose = handshake.read(self._secret)
        except (OSError, HandshakeError) as error:
            self._refuse(fd, str(error))
            return
        if purpose is not None:
            self._forget(fd)
            self._arrived.append(Arrival(purpose, handshake.end, handshake.name))

    def _refuse(self, fd: int, reason: str) -> None:
        handshake = self._forget(fd)
        self._log(handshake.name, reason)
        handshake.end.close()

    def _forget(self, fd: int) -> Handshake:
        self._poller.unregister(fd)
        return self._handshakes.pop(fd)

    def _log(self, name: str, reason: str) -> None:
        """Log a refusal, at most once per reason in LOGGED_S."""
        now_s = time.monotonic()
        if now_s >= self._logged_s.get(reason, now_s):
            self._logged_s[reason] = now_s + LOGGED_S
            log.warning("%s was refused: %s", name, reason)

    def close(self) -> None:
        """Stop listening, and close connections with incomplete handshakes."""
        self._listener.close()
        for fd in list(self._handshakes):
            self._forget(fd).end.close()
        while self._arrived:
            self._arrived.popleft().end.close()
