"""RemoteStore: the remote tier, a pool of Mooncake Store shared by many replicas. Every failure counts as a miss.

An object is a block with all its layers. Pools move objects of at least 256 KiB at full speed; smaller ones take
several times as long per byte.
"""

from __future__ import annotations

import ipaddress
import logging
import mmap
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Literal

import numpy as np

from pypto_serving.ipc import SocketChannel
from pypto_serving.processes import ChildFault, start_module
from pypto_serving.store.base import DIGEST_BYTES, Piece, digest
from pypto_serving.store.mooncake import PoolAddress, PoolReply, PoolRequest, PoolStart, await_message
from pypto_serving.types.arrays import BlockBytes
from pypto_serving.types.tier import ALIGNMENT, TierInventory, parse_pool_url
from pypto_serving.util import Backoff, Clock, ceil_div, parse_size

log = logging.getLogger(__name__)

DEFAULT_PORT = 50051
REQUEST_BYTES = 8 << 20
"""Limit of the bytes of one request, unless a single block is larger."""
MAX_NAMES = 4096
REQUEST_TIMEOUT_S = 2.0
JOIN_TIMEOUT_S = 10.0
UNREACHABLE = -800
"""Codes of Mooncake up to this one are errors of connections, larger ones are errors of objects."""

Direction = Literal["up", "down"]


def parse_address(url: str) -> PoolAddress:
    """Parse a URL and fill in defaults. Raises ValueError for an invalid URL."""
    host, port, given = parse_pool_url(url)
    port = port or DEFAULT_PORT
    return PoolAddress(
        master=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        metadata_server=given.get("metadata_server", "P2PHANDSHAKE"),
        protocol=given.get("protocol", "tcp"),
        device=given.get("device", ""),
        local_hostname=given.get("local_hostname") or own_address(host),
        segment_bytes=parse_size(given.get("segment_size", "0")),
    )


def own_address(host: str) -> str:
    """Return this machine's address on the route to `host`, without sending anything."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, DEFAULT_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(ipaddress.ip_address(probe.getsockname()[0]))
    except OSError:
        return socket.gethostname()


class PoolChannel:
    """One channel to the pool's process, with its part of the shared memory. Used only while holding `lock`."""

    def __init__(self, memory: BlockBytes, start: int) -> None:
        self.lock = threading.Lock()
        self.memory = memory
        self.start = start
        self.connection: SocketChannel[PoolReply] | None = None

    def ask(self, request: PoolRequest) -> list[int] | None:
        """Return Mooncake's codes, or None if no answer came in time."""
        connection = self.connection
        if connection is None:
            return None
        connection.send(request)
        reply = await_message(connection, REQUEST_TIMEOUT_S)
        return None if reply is None else reply.codes


class PoolProcess:
    """One life of the process that joins the pool."""

    def __init__(
        self, address: PoolAddress, channels: Sequence[PoolChannel], memory: int, num_bytes: int, now_s: float
    ) -> None:
        pairs = [SocketChannel.pair(PoolReply) for _ in channels]
        start = PoolStart(address, tuple(end.fileno() for _, end in pairs), memory, num_bytes)
        self._child = start_module("pypto_serving.store.mooncake", start, *(end for _, end in pairs), shared=(memory,))
        self.connections = [connection for connection, _ in pairs]
        self.joined = False
        self._deadline_s = now_s + JOIN_TIMEOUT_S

    def fault(self, now_s: float) -> str | None:
        """Return why the process must be replaced, or None. Sets `joined`."""
        said = self._child.messages()
        for message in said:
            if isinstance(message, ChildFault):
                return message.message
        self.joined |= bool(said)
        if self._child.gone:
            return "its client ended unexpectedly"
        return "its master does not answer" if not self.joined and now_s > self._deadline_s else None

    def end(self) -> None:
        """End the process, so that it no longer writes to the memory. Threads that wait for an answer notice this."""
        self._child.end(0)


class RemoteStore:
    """Owns the process that talks to the pool, and the memory it shares with that process.

    Objects are named `pypto/FINGERPRINT/KEY`, and keys differ between groups. The content is a block, then a digest of
    key and block. If a request has no answer in 2 s, or Mooncake could not send it, the process is ended. A new one
    starts with exponential backoff, after at most a minute. Until it has joined, every call returns a miss at once.
    """

    def __init__(
        self, address: PoolAddress, fingerprint: bytes, block_bytes: Sequence[int], clock: Clock | None = None
    ) -> None:
        self.address = address
        self._prefix = f"pypto/{fingerprint.hex()}/"
        self._strides = [ceil_div(size + DIGEST_BYTES, ALIGNMENT) * ALIGNMENT for size in block_bytes]
        self._clock = clock or time.monotonic
        channel_bytes = max(REQUEST_BYTES, *self._strides)
        self._num_bytes = 2 * channel_bytes
        self._memory_fd = os.memfd_create("pypto-pool")
        os.ftruncate(self._memory_fd, self._num_bytes)
        memory = np.frombuffer(mmap.mmap(self._memory_fd, self._num_bytes), dtype=np.uint8)
        self._channels: dict[Direction, PoolChannel] = {
            "up": PoolChannel(memory[:channel_bytes], 0),
            "down": PoolChannel(memory[channel_bytes:], channel_bytes),
        }
        self._state = threading.Lock()
        self._process: PoolProcess | None = None
        self._up: bool | None = None
        self._closed = False
        self._backoff = Backoff()
        self._is_up()

    # The seam.

    @property
    def writable(self) -> bool:
        """Always true, since an unreachable pool may come back."""
        return True

    def inventory(self) -> TierInventory:
        """Return an empty, shared inventory, since a pool must be asked for blocks."""
        return TierInventory("remote", shared=True)

    def store(self, pieces: Sequence[Piece]) -> list[bool]:
        return [done for part in self._parts(pieces) for done in self._store(part)]

    def load(self, pieces: Sequence[Piece]) -> list[bool]:
        return [done for part in self._parts(pieces) for done in self._load(part)]

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        found: list[bool] = []
        for first in range(0, len(keys), MAX_NAMES):
            names = [self._name(key) for key in keys[first : first + MAX_NAMES]]
            with self._channels["up"].lock:
                codes = self._ask("up", PoolRequest("find", names, [], []))
            found += [code == 1 for code in codes]
        return found

    def clear(self) -> None:
        """Remove all blocks of this fingerprint, including other replicas', if the pool can be reached."""
        with self._channels["down"].lock:
            self._ask("down", PoolRequest("clear", [self._prefix], [], []))

    def close(self) -> None:
        with self._state:
            self._closed = True
            if self._process is not None:
                self._process.end()
                self._process = None

    # One request each.

    def _parts(self, pieces: Sequence[Piece]) -> list[list[Piece]]:
        """Split pieces into parts that each fit a channel."""
        parts: list[list[Piece]] = []
        room = 0
        for piece in pieces:
            stride = self._strides[piece.group]
            if not parts or stride > room:
                parts.append([])
                room = len(self._channels["up"].memory)
            parts[-1].append(piece)
            room -= stride
        return parts

    def _store(self, pieces: Sequence[Piece]) -> list[bool]:
        channel = self._channels["down"]
        if not self._is_up():
            return [False] * len(pieces)
        with channel.lock:
            request, places = self._request("put", channel, pieces)
            for piece, place in zip(pieces, places, strict=True):
                place[:-DIGEST_BYTES] = piece.memory
                place[-DIGEST_BYTES:] = np.frombuffer(digest(piece.key, place[:-DIGEST_BYTES]), dtype=np.uint8)
            return [code == 0 for code in self._ask("down", request)]

    def _load(self, pieces: Sequence[Piece]) -> list[bool]:
        channel = self._channels["up"]
        with channel.lock:
            request, places = self._request("get", channel, pieces)
            codes = self._ask("up", request)
            return [
                code == len(place) and self._take(piece, place)
                for piece, place, code in zip(pieces, places, codes, strict=True)
            ]

    def _take(self, piece: Piece, place: BlockBytes) -> bool:
        content = place[:-DIGEST_BYTES]
        if digest(piece.key, content) != place[-DIGEST_BYTES:].tobytes():
            return False
        np.copyto(piece.memory, content)
        return True

    def _request(
        self, kind: Literal["put", "get"], channel: PoolChannel, pieces: Sequence[Piece]
    ) -> tuple[PoolRequest, list[BlockBytes]]:
        """Return a request, and the parts of the channel's memory for its objects."""
        offsets = np.cumsum([0, *(self._strides[piece.group] for piece in pieces)]).tolist()[:-1]
        sizes = [len(piece.memory) + DIGEST_BYTES for piece in pieces]
        places = [channel.memory[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]
        names = [self._name(piece.key) for piece in pieces]
        return PoolRequest(kind, names, [channel.start + offset for offset in offsets], sizes), places

    def _name(self, key: bytes) -> str:
        return self._prefix + key.hex()

    # The process.

    def _ask(self, channel: Direction, request: PoolRequest) -> list[int]:
        """Return the codes of a request; all UNREACHABLE if the pool is. The caller must hold the channel's lock."""
        codes = None
        if self._is_up():
            process = self._process
            codes = self._channels[channel].ask(request)
            if codes is None:
                self._lose(process, "it does not answer")
            elif codes and all(code <= UNREACHABLE for code in codes):
                self._lose(process, f"it cannot be reached (code {codes[0]})")
            else:
                self._succeed()
        return [UNREACHABLE] * len(request.names) if codes is None else codes

    def _is_up(self) -> bool:
        """Return whether requests can be sent. Start the process when due; never wait."""
        with self._state:
            now_s = self._clock()
            if self._process is None:
                if self._closed or not self._backoff.is_over(now_s):
                    return False
                self._start(now_s)
            assert self._process is not None
            fault = self._process.fault(now_s)
            if fault is not None:
                self._end(fault)
            return self._process is not None and self._process.joined

    def _start(self, now_s: float) -> None:
        channels = list(self._channels.values())
        self._process = PoolProcess(self.address, channels, self._memory_fd, self._num_bytes, now_s)
        for channel, connection in zip(channels, self._process.connections, strict=True):
            channel.connection = connection

    def _succeed(self) -> None:
        self._backoff.succeed()
        if not self._up:
            self._up = True
            log.info("remote tier: the pool at %s is in reach", self.address.master)

    def _lose(self, process: PoolProcess | None, reason: str) -> None:
        """End the process after a failed request, unless another thread has done so already."""
        with self._state:
            if process is not None and process is self._process:
                self._end(reason)

    def _end(self, reason: str) -> None:
        assert self._process is not None
        self._process.end()
        self._process = None
        self._backoff.fail(self._clock())
        if self._up is not False:
            self._up = False
            log.warning("remote tier: the pool at %s is out of reach: %s; going without", self.address.master, reason)
