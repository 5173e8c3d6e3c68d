"""Barriers of ranks, and links that carry the data of a step between the memories of two hosts."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pypto_serving.errors import PyptoError
from pypto_serving.kernels.abi import Handle, LibraryObject, loaded
from pypto_serving.kernels.engine import zeros
from pypto_serving.types.arrays import Array, PairArray, UInt8Array


class RanksGone(PyptoError):
    """A step was given up because a barrier was closed."""

    def __init__(self) -> None:
        super().__init__("a rank that this one waits for is gone")


class RankBarrier(LibraryObject):
    """Owns one rank's end of a barrier. `counts` is memory shared by all ranks, with one count per rank, 0 at first.

    The n-th wait increments the count `own`, if any, and waits until all counts, or the counts `awaited`, are n.
    """

    drop = "drop_barrier"

    def __init__(self, counts: UInt8Array, own: int | None, awaited: range | None = None) -> None:
        super().__init__()
        self._counts, self._ranks = counts, self.num_ranks(counts)
        awaited = range(self._ranks) if awaited is None else awaited
        if not 0 <= (own or 0) < self._ranks or not 0 <= awaited.start <= awaited.stop <= self._ranks:
            raise ValueError(f"{self._ranks} ranks cannot wait as {own} for {awaited}")
        self.handle: Handle = self._lib.barrier(counts, -1 if own is None else own, awaited.start, awaited.stop)

    @staticmethod
    def num_bytes(ranks: int) -> int:
        """Return the size of the memory for a barrier of `ranks` ranks."""
        return ranks * int(loaded().count_bytes())

    @staticmethod
    def num_ranks(counts: UInt8Array) -> int:
        """Count the ranks of the barrier in this memory."""
        return len(counts) // RankBarrier.num_bytes(1)

    def wait(self) -> bool:
        """Wait until every rank has called this as often as this rank; return False if the barrier is closed."""
        return bool(self._lib.wait_barrier(self.handle))

    def close(self) -> None:
        """Make all present and future waits return."""
        self._lib.close_counts(self._counts, self._ranks)


class Extent(enum.Enum):
    """Number of rows of an array in a step: one per token, per row of logits or per row; or one more than rows."""

    TOKENS = enum.auto()
    LOGITS = enum.auto()
    ROWS = enum.auto()
    EDGES = enum.auto()


class Mirrored:
    """An array of 32-bit words that both hosts have. It has `most` rows; `extent` says how many of them a step uses.

    With `known`, this host remembers the other host's content, and sends only words that differ.
    """

    def __init__(self, array: Array, extent: Extent, most: int, known: bool = True) -> None:
        words: PairArray = array.reshape(-1).view(np.uint32)
        self.sent = zeros(np.uint32, len(words)) if known else None
        self.fields = (words, self.sent, len(words) // most, most, extent)


class Mirrors:
    """Arrays that a link transfers together."""

    def __init__(self, arrays: Sequence[Mirrored]) -> None:
        self._kept = tuple(arrays)
        self.structs = loaded().structs["Mirror"].array(mirrored.fields for mirrored in arrays)

    def __len__(self) -> int:
        return len(self._kept)


class Link(LibraryObject):
    """Owns one end of a connection and its file descriptor. Fails if no byte is transferred for `patience_s`."""

    drop = "unlink"

    def __init__(self, fd: int, patience_s: float) -> None:
        super().__init__()
        self.handle: Handle = self._lib.link(fd, int(patience_s * 1000))

    def send_step(self, mirrors: Mirrors, buffers: int, tokens: int, rows: int, logits: int) -> bool:
        """Send a step to a ReceiveThread; return False if the link has failed."""
        return bool(self._lib.send_step(self.handle, mirrors.structs, len(mirrors), buffers, tokens, rows, logits))


class ReceiveThread(LibraryObject):
    """Owns a thread that receives data of a link into the arrays `mirrors`, the same number for each of `slots` steps.

    After each step, it increments all `counts` of a barrier. With `publishes`, `counts` is the memory of a StepBoard,
    on which it publishes the step. When the link has ended, it closes the counts.
    """

    drop = "end_receive_thread"

    def __init__(self, link: Link, mirrors: Mirrors, slots: int, counts: UInt8Array, publishes: bool = False) -> None:
        super().__init__()
        self._kept = (link, mirrors, counts)
        places: dict[str, Any] = {"link": link.handle, "mirrors": mirrors.structs, "counts": counts}
        sizes = {"slots": slots, "arrays": len(mirrors) // slots}
        num_counts = 1 if publishes else RankBarrier.num_ranks(counts)
        board = counts if publishes else None
        self.handle: Handle = self._lib.receive_thread(**places, **sizes, board=board, num_counts=num_counts)


@dataclass(frozen=True, slots=True)
class Links:
    """A rank's ends of the connections in `Topology.connections`; None for connections of other ranks."""

    steps: Link | None = None
    exchange: Link | None = None
    rows: Link | None = None
    logits: Link | None = None
