"""KV blocks split over two hosts. Lower tiers see whole blocks in the serving host's memory.

Before a tier stores a block, the other host's part is fetched; after a tier loads a block, that part is sent to the
other host. A message is a head, block ids, and for each block the bytes of its spans and their checksum, since a
damaged block might stay on disk for years.
"""

from __future__ import annotations

import socket
import struct
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import numpy as np

from pypto_serving.backend.base import HostBlocks
from pypto_serving.errors import PyptoError
from pypto_serving.threads import start_thread
from pypto_serving.types.arrays import BlockBytes
from pypto_serving.types.kv import Spans

_HEAD, _CHECKSUM = struct.Struct("<BII"), struct.Struct("<I")
_FETCH, _PUT, _DONE = 1, 2, b"\x01"


def merged(spans: Iterable[Spans]) -> Spans:
    """Return the bytes that are in any of `spans`."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(span for each in spans for span in each):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif begin < end:
            found.append((begin, end))
    return tuple(found)


def without(spans: Spans, others: Spans) -> Spans:
    """Return the bytes of `spans` that are not in `others`; both are `merged`."""
    found = []
    for begin, end in spans:
        inside = [(max(begin, first), min(end, last)) for first, last in others if first < end and last > begin]
        edges = [begin, *(edge for span in inside for edge in span), end]
        found += [(first, last) for first, last in zip(edges[::2], edges[1::2], strict=True) if first < last]
    return tuple(found)


class BlocksError(PyptoError):
    """The other host is gone, or blocks arrived damaged. The connection cannot be used any more."""


class SplitBlocks(HostBlocks):
    """The serving host's blocks. Per group, its ranks hold the spans `own`, the other host's ranks the spans `others`.

    Raises BlocksError if the other host does not answer in time.
    """

    def __init__(
        self, arenas: Sequence[BlockBytes], own: Sequence[Spans], others: Sequence[Spans], fd: int, patience_s: float
    ) -> None:
        super().__init__(arenas)
        self._others = others
        self._lacking = [without(theirs, ours) for theirs, ours in zip(others, own, strict=True)]
        self._end, self._lock = socket.socket(fileno=fd), threading.Lock()
        self._end.settimeout(patience_s)

    def read_blocks(self, group: int, blocks: Sequence[int]) -> list[BlockBytes]:
        """Fetch the spans that only the other host has, and return views of the whole blocks."""
        if lacking := self._lacking[group]:
            with self._exchange():
                _send(self._end, _FETCH, group, blocks)
                for block in blocks:
                    _receive_into(self._end, self.arenas[group][block], lacking)
        return super().read_blocks(group, blocks)

    def staging(self, group: int, blocks: Sequence[int]) -> list[BlockBytes]:
        """Return views of the blocks, into which loads write directly."""
        return super().read_blocks(group, blocks)

    def write_blocks(self, group: int, blocks: Sequence[int], contents: Sequence[BlockBytes]) -> None:
        """Send the other host its spans of the blocks, and wait until it has them."""
        if blocks:
            with self._exchange():
                _send(self._end, _PUT, group, blocks)
                for block in blocks:
                    _send_block(self._end, self.arenas[group][block], self._others[group])
                _receive(self._end, len(_DONE))

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        except (OSError, ValueError) as error:
            raise BlocksError(f"blocks cannot be exchanged with the other host: {error}") from None


def serve_blocks(fd: int, arenas: Sequence[BlockBytes], others: Sequence[Spans], own: Sequence[Spans]) -> None:
    """Start a thread that lets the serving host fetch and put blocks here. Its ranks hold the spans `others`."""
    end = socket.socket(fileno=fd)
    start_thread("blocks", lambda: _serve(end, arenas, others, own), lambda error: end.close())


def _serve(end: socket.socket, arenas: Sequence[BlockBytes], others: Sequence[Spans], own: Sequence[Spans]) -> None:
    lacking = [without(ours, theirs) for ours, theirs in zip(own, others, strict=True)]
    end.settimeout(None)
    try:
        while True:
            kind, group, count = _HEAD.unpack(_receive(end, _HEAD.size))
            arena = arenas[group]
            if count > len(arena):
                raise ValueError(f"{count} blocks")
            blocks = np.frombuffer(_receive(end, 4 * count), np.uint32)
            if kind == _FETCH:
                for block in blocks:
                    _send_block(end, arena[block], lacking[group])
            else:
                for block in blocks:
                    _receive_into(end, arena[block], own[group])
                end.sendall(_DONE)
    except (OSError, IndexError, ValueError):
        end.close()  # the serving host notices


def _send(end: socket.socket, kind: int, group: int, blocks: Sequence[int]) -> None:
    end.sendall(_HEAD.pack(kind, group, len(blocks)) + np.array(blocks, np.uint32).tobytes())


def _send_block(end: socket.socket, block: BlockBytes, spans: Spans) -> None:
    data = np.concatenate([block[:0], *(block[begin:last] for begin, last in spans)]).data
    end.sendall(data)
    end.sendall(_CHECKSUM.pack(zlib.crc32(data)))


def _receive_into(end: socket.socket, block: BlockBytes, spans: Spans) -> None:
    data = np.frombuffer(_receive(end, sum(last - first for first, last in spans)), np.uint8)
    if _CHECKSUM.pack(zlib.crc32(data.data)) != _receive(end, _CHECKSUM.size):
        raise ValueError("a block arrived damaged")
    offsets = np.cumsum([0, *(last - first for first, last in spans)]).tolist()
    for (begin, stop), (first, last) in zip(spans, pairwise(offsets), strict=True):
        block[begin:stop] = data[first:last]


def _receive(end: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        if not (count := end.recv_into(view[done:])):
            raise ConnectionError("the other host is gone")
        done += count
    return data
