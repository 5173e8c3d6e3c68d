"""A barrier of processes, within recorded steps or outside."""

from __future__ import annotations

from pypto_serving.errors import PyptoError
from pypto_serving.kernels.arguments import Handle
from pypto_serving.kernels.library import library
from pypto_serving.types.arrays import UInt8Array


class RanksGone(PyptoError):
    """A step was given up, because a barrier was closed."""

    def __init__(self) -> None:
        super().__init__("a rank that this one waits for is gone")


class RankBarrier:
    """Owns one rank's end of a barrier. `counts` is memory that all ranks share, zero at first, with a count for each.

    To wait for the n-th time is to advance the count `own`, if any, and to wait until all counts, or those `awaited`,
    are n.
    """

    def __init__(self, counts: UInt8Array, own: int | None, awaited: range | None = None) -> None:
        lib = library()
        assert lib is not None
        self._lib, self._counts, self._ranks = lib, counts, self.num_ranks(counts)
        awaited = range(self._ranks) if awaited is None else awaited
        if not 0 <= (own or 0) < self._ranks or not 0 <= awaited.start <= awaited.stop <= self._ranks:
            raise ValueError(f"{self._ranks} ranks cannot wait as {own} for {awaited}")
        self.handle: Handle = lib.barrier(counts, -1 if own is None else own, awaited.start, awaited.stop)

    @staticmethod
    def num_bytes(ranks: int) -> int:
        """Return the size of the memory for a barrier of `ranks` ranks."""
        lib = library()
        assert lib is not None
        return ranks * int(lib.count_bytes())

    @staticmethod
    def num_ranks(counts: UInt8Array) -> int:
        """Count the ranks of the barrier in this memory."""
        return len(counts) // RankBarrier.num_bytes(1)

    def wait(self) -> bool:
        """Wait until every rank has come as often as this one; return False if the barrier is closed."""
        return bool(self._lib.wait_barrier(self.handle))

    def close(self) -> None:
        """Let all ranks that wait, now and later, return."""
        self._lib.close_counts(self._counts, self._ranks)

    def __del__(self) -> None:
        if handle := getattr(self, "handle", None):
            self._lib.drop_barrier(handle)
