"""RespawnLimit: decide whether to start a dead child again."""

from __future__ import annotations

from collections import deque

from pypto_serving.types.config import FaultConfig
from pypto_serving.util import counted


class RespawnLimit:
    """Counts the deaths of `child`: consecutive ones without a completed step, and all within a window of time.

    The second count stops a child that completes a few steps in each life.
    """

    def __init__(self, child: str, most_in_a_row: int, faults: FaultConfig) -> None:
        self.in_a_row = 0
        self._child = child
        self._most_in_a_row = most_in_a_row
        self._most, self._window_s = faults.max_deaths, faults.deaths_window_s
        self._times_s: deque[float] = deque()

    def count_death(self, now_s: float) -> str | None:
        """Count a death. Return the reason not to start the child again, or None."""
        self.in_a_row += 1
        self._times_s.append(now_s)
        while self._times_s[0] < now_s - self._window_s:
            self._times_s.popleft()
        if self.in_a_row > self._most_in_a_row:
            return f"{self._child} died {counted(self.in_a_row, 'time')} without completing a step"
        if len(self._times_s) > self._most:
            return f"{self._child} died {counted(len(self._times_s), 'time')} within {self._window_s:.0f} s"
        return None

    def count_step(self) -> None:
        """Reset the count of consecutive deaths, since a step was completed."""
        self.in_a_row = 0

    def forgive_deaths(self) -> None:
        """Forget all deaths, since the child is not to blame."""
        self.in_a_row = 0
        self._times_s.clear()
