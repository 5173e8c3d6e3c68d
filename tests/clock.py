"""A clock for tests of schedulers, engines and stores."""

from __future__ import annotations


class VirtualClock:
    """A clock that moves only when advanced."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def __call__(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward; raise ValueError for a negative step."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {-seconds} s")
        self._now_s += seconds
