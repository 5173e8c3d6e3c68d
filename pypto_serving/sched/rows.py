"""Rows: which of the worker's rows are free, and which it has to drop."""

from __future__ import annotations

from collections.abc import Iterable


class Rows:
    """Owns the numbers of the worker's rows. Part of the Scheduler, which lends one to each running request."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = list(range(count - 1, -1, -1))
        self._dropped: list[int] = []

    def __bool__(self) -> bool:
        """Whether a row is free."""
        return bool(self._free)

    def take(self) -> int:
        """Lend a free row."""
        return self._free.pop()

    def give_back(self, row: int) -> None:
        """Take a row back. The worker is told by the next plan."""
        self._free.append(row)
        self._dropped.append(row)

    def take_dropped(self) -> list[int]:
        """Return the rows that the worker has not been told to drop."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def check(self, lent: Iterable[int]) -> None:
        """Assert that free and lent rows are all rows."""
        assert sorted([*lent, *self._free]) == list(range(self._count)), "rows leaked"
