"""The serving host's side of a replica over two hosts: wait for the other host, and take its connections."""

from __future__ import annotations

import importlib.metadata
import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from pypto_serving.backend.base import Progress
from pypto_serving.backend.control import SILENT_BEATS, Control
from pypto_serving.backend.greeting import (
    CONTROL,
    GREETING_S,
    LIFE_BYTES,
    GreetingError,
    Purpose,
    listen,
    swift,
    welcome,
)
from pypto_serving.errors import EXIT_USAGE, ConfigError
from pypto_serving.ipc import ChildFault, SocketChannel
from pypto_serving.kernels.library import library
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.hosts import FromHost, HostHello, HostStart, read_secret

log = logging.getLogger(__name__)

WAITING = "waiting for another host"
MOST_GREETINGS = 16
"""Connections that are greeted at once; others are closed."""
PROGRESS_S = 0.5


def program_version() -> str:
    """Name this program and its kernels: both hosts must compute the same bits."""
    lib = library()
    assert lib is not None
    return f"{importlib.metadata.version('pypto-serving')} ({lib.sources()[:8]})"


class Joined(NamedTuple):
    """The other host: its control connection, and file descriptors of the others by name."""

    name: str
    control: Control
    links: Mapping[str, int]


class Arrival(NamedTuple):
    """A connection whose other side knows the secret."""

    purpose: Purpose
    end: socket.socket
    name: str


def await_host(config: EngineConfig, digest: bytes, progress: Progress) -> Joined:
    """Let the other host join, with all its connections; nothing listens afterwards.

    Raises ConfigError where nothing can listen, or if that takes longer than a step may, in which a host that is gone
    has been silent before.
    """
    faults = config.faults
    waiting_s = max(GREETING_S, faults.step_timeout_s - SILENT_BEATS * faults.heartbeat_s)
    deadline_s = time.monotonic() + waiting_s
    door = Door(config.join_address, read_secret(config.join_secret_file))
    try:
        while True:
            for arrival in door.arrivals(deadline_s, progress):
                if arrival.purpose == CONTROL and (joined := _let_in(config, arrival, door, digest)):
                    return joined
                arrival.end.close()
    finally:
        door.close()


def _let_in(config: EngineConfig, arrival: Arrival, door: Door, digest: bytes) -> Joined | None:
    """Take a host's connections if it can join; else tell it why not, and return None."""
    channel: SocketChannel[FromHost] = SocketChannel(arrival.end, FromHost)
    hello = channel.receive(GREETING_S)
    if not isinstance(hello, HostHello):
        return None
    if problem := _mismatch(config, hello, digest):
        log.warning("%s cannot join: %s", arrival.name, problem)
        channel.send(ChildFault(problem, EXIT_USAGE))
        channel.close(linger_s=GREETING_S)
        return None
    life = secrets.token_bytes(LIFE_BYTES)
    channel.send(HostStart(config, life))
    wanted, found = set(config.topology.connections), dict[str, socket.socket]()
    for other in door.arrivals(time.monotonic() + GREETING_S, lambda *_: None, patient=False):
        name, its_life = other.purpose
        if its_life == life and name in wanted - found.keys():
            found[name] = other.end
        else:
            other.end.close()
        if found.keys() == wanted:
            links = {name: end.detach() for name, end in found.items()}
            return Joined(f"host {hello.name} at {arrival.name}", Control(channel, config.faults.heartbeat_s), links)
    for end in found.values():
        end.close()
    return None


def _mismatch(config: EngineConfig, hello: HostHello, digest: bytes) -> str:
    if hello.version != (version := program_version()):
        return f"it runs pypto-serving {hello.version}, and this host {version}; install the same"
    if hello.digest != digest:
        return f"its model is not the one that this host serves from {config.model}; give both the same files"
    return ""


class Door:
    """Owns the socket on which other hosts arrive, and the threads that greet them."""

    def __init__(self, address: str, secret: bytes) -> None:
        self.address, self._secret = address, secret
        try:
            self._listener = listen(address)
        except OSError as error:
            raise ConfigError(f"{address} cannot be used for another host to join: {error.strerror}") from None
        self._arrived: queue.Queue[Arrival] = queue.Queue()
        self._places = threading.BoundedSemaphore(MOST_GREETINGS)
        self._thread = threading.Thread(target=self._accept, name="hosts", daemon=True)
        self._thread.start()

    def arrivals(self, deadline_s: float, progress: Progress, patient: bool = True) -> Iterable[Arrival]:
        """Yield connections as they arrive, until the deadline; raises ConfigError then if `patient`."""
        while (left_s := deadline_s - time.monotonic()) > 0:
            progress(f"{WAITING} at {self.address}", 0, 1)
            try:
                yield self._arrived.get(timeout=min(PROGRESS_S, left_s))
            except queue.Empty:
                continue
        if patient:
            raise ConfigError(f"no host joined at {self.address} within the step timeout; run `pypto-serving join`")

    def _accept(self) -> None:
        while True:
            try:
                end, peer = self._listener.accept()
            except OSError:
                return
            if self._places.acquire(blocking=False):
                threading.Thread(target=self._greet, args=(end, f"{peer[0]}:{peer[1]}"), daemon=True).start()
            else:
                end.close()

    def _greet(self, end: socket.socket, name: str) -> None:
        try:
            swift(end)
            self._arrived.put(Arrival(welcome(end, self._secret), end, name))
        except (OSError, GreetingError) as error:
            log.warning("%s was refused: %s", name, error)
            end.close()
        finally:
            self._places.release()

    def close(self) -> None:
        """Listen no more."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._listener.close()
        while not self._arrived.empty():
            self._arrived.get().end.close()
