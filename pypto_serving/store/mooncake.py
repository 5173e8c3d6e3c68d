"""`python -m pypto_serving.store.mooncake FD`: the process that talks to a pool of Mooncake Store for a worker.

Mooncake's client blocks for seconds when its master is gone, blocks forever when the master is stopped, and may crash.
In a separate process it can be ended, after which it no longer writes to memory. Objects are transferred from and to
shared memory, which is registered with Mooncake.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import re
import select
import socket
import sys
import time
from functools import partial
from typing import Any, Literal, TypeVar

import msgspec

from pypto_serving.errors import EXIT_ENGINE, EXIT_OK
from pypto_serving.ipc import SocketChannel
from pypto_serving.processes import Parent
from pypto_serving.threads import start_thread

T = TypeVar("T")


class PoolAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters for joining a pool; see the user guide. This host adds `segment_bytes` of memory to the pool."""

    master: str
    metadata_server: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    device: str = ""
    local_hostname: str = "127.0.0.1"
    segment_bytes: int = 0


class PoolStart(msgspec.Struct, frozen=True):
    """`channels` and `memory`, a memfd of `num_bytes`, are inherited file descriptors."""

    address: PoolAddress
    channels: tuple[int, ...]
    memory: int
    num_bytes: int


class PoolRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Put objects from the shared memory, get them into it, check which exist, or remove all with a prefix.

    `sizes` are in bytes; to clear, `names` is the prefix.
    """

    kind: Literal["put", "get", "find", "clear"]
    names: list[str]
    offsets: list[int]
    sizes: list[int]


class PoolReply(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Mooncake's code for each object: 0 for put, size for get, 1 if found, number for clear; errors are negative."""

    codes: list[int]


def await_message(channel: SocketChannel[T], timeout_s: float = math.inf) -> T | None:
    """Wait for the next message; return None at the deadline, or as soon as the peer is gone."""
    deadline_s = time.monotonic() + timeout_s
    poller = select.poll()
    while (message := channel.receive()) is None and not channel.gone:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return None
        poller.register(channel.socket, channel.events)
        poller.poll(math.ceil(min(left_s, 3600) * 1000))
        channel.flush()
    return message


def join_pool(address: PoolAddress, memory: int, num_bytes: int) -> Any:
    """Return a client of the pool that may use the memory. Raises RuntimeError with one line."""
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise RuntimeError(f"mooncake cannot be loaded: {error}") from None
    pool = MooncakeDistributedStore()
    code = pool.setup(
        address.local_hostname,
        address.metadata_server,
        address.segment_bytes,
        0,
        address.protocol,
        address.device,
        address.master,
    )
    code = code or pool.register_buffer(memory, num_bytes)
    if code:
        raise RuntimeError(f"the pool cannot be joined (code {code})")
    return pool


def serve(channel: SocketChannel[PoolRequest], pool: Any, memory: int) -> None:
    """Answer the requests of one channel until it closes."""
    while (request := await_message(channel)) is not None:
        places = [memory + offset for offset in request.offsets]
        if request.kind == "put":
            codes = pool.batch_put_from(request.names, places, request.sizes)
        elif request.kind == "get":
            codes = pool.batch_get_into(request.names, places, request.sizes)
        elif request.kind == "find":
            codes = pool.batch_is_exist(request.names)
        else:
            codes = [pool.remove_by_regex("^" + re.escape(request.names[0]), True)]
        channel.send(PoolReply(list(codes)))


def main() -> int:
    parent = Parent.of_module(PoolStart)
    start = parent.start
    os.dup2(2, 1)  # stdout belongs to the server's ready line
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    shared = mmap.mmap(start.memory, start.num_bytes)
    memory = ctypes.addressof(ctypes.c_char.from_buffer(shared))
    try:
        pool = join_pool(start.address, memory, start.num_bytes)
    except RuntimeError as error:
        parent.fault(str(error), EXIT_ENGINE)
        return EXIT_ENGINE
    parent.progress("joined", 1, 1)
    channels = [SocketChannel[PoolRequest](socket.socket(fileno=fd), PoolRequest) for fd in start.channels]
    threads = [start_thread("pool", partial(serve, channel, pool, memory)) for channel in channels]
    for thread in threads:
        thread.join()
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
