"""Rate: a speed that is measured while running."""

from __future__ import annotations

DECAY = 0.9
OPTIMISM = 1.05


class Rate:
    """Units per second over the latest measurements; each earlier one counts 0.9 times the one after it.

    Something never measured counts as infinitely fast, so that it is tried.
    """

    def __init__(self) -> None:
        self._units = 0.0
        self._seconds = 0.0

    def add(self, units: float, seconds: float) -> None:
        """`units` took `seconds`."""
        self._units = self._units * DECAY + units
        self._seconds = self._seconds * DECAY + seconds

    def refuse(self) -> None:
        """It was too slow to be used. Believe 5 per cent more of it, or a bad moment would last for ever."""
        self._seconds /= OPTIMISM

    @property
    def measured(self) -> bool:
        return self._units > 0

    @property
    def per_second(self) -> float:
        return self._units / self._seconds if self._seconds else float("inf")

    def seconds(self, units: float) -> float:
        """How long `units` are expected to take."""
        return units / self.per_second
