"""Meeting: a barrier of processes, within recorded steps or outside."""

from __future__ import annotations

from pypto_serving.kernels.arguments import Handle
from pypto_serving.kernels.library import library
from pypto_serving.types.arrays import UInt8Array


class RanksGone(RuntimeError):
    """A step was given up, because a meeting was closed."""


class Meeting:
    """Owns one rank's end of a barrier of `ranks` ranks. `counts` is zero memory that all of them share.

    A rank that does not wait only tells the others that it has come. Without `rank`, it only waits for them.
    """

    def __init__(self, counts: UInt8Array, rank: int | None, ranks: int, waits: bool = True) -> None:
        lib = library()
        assert lib is not None
        if len(counts) != self.num_bytes(ranks) or not 0 <= (rank or 0) < ranks:
            raise ValueError(f"rank {rank} of {ranks} cannot meet in {len(counts)} bytes")
        self._lib, self._counts, self._ranks = lib, counts, ranks
        self.handle: Handle = lib.meeting(counts, -1 if rank is None else rank, 0, ranks if waits else 0)

    @staticmethod
    def num_bytes(ranks: int) -> int:
        """Return the size of the memory in which `ranks` ranks meet."""
        lib = library()
        assert lib is not None
        return ranks * int(lib.count_bytes())

    def meet(self) -> bool:
        """Wait until every rank has come as often as this one; return False if the meeting is closed."""
        return bool(self._lib.meet(self.handle))

    def close(self) -> None:
        """Let all ranks that wait, now and later, return."""
        self._lib.close_counts(self._counts, self._ranks)

    def __del__(self) -> None:
        if handle := getattr(self, "handle", None):
            self._lib.leave(handle)
