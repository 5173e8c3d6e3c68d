"""Rate: a speed, measured while running."""

from __future__ import annotations

DECAY = 0.9
"""Weight of a measurement, relative to the one after it."""
OPTIMISM = 1.05
"""Factor of the estimate after each refusal."""


class Rate:
    """Units per second, averaged over the latest measurements. Infinite until the first, so that it is made."""

    def __init__(self) -> None:
        self._units = 0.0
        self._seconds = 0.0

    def add(self, units: float, seconds: float) -> None:
        """Record that `units` took `seconds`."""
        self._units = self._units * DECAY + units
        self._seconds = self._seconds * DECAY + seconds

    def refuse(self) -> None:
        """Raise the estimate 5 %, so that what was too slow to be used is tried again one day."""
        self._seconds /= OPTIMISM

    @property
    def measured(self) -> bool:
        return self._units > 0

    @property
    def per_second(self) -> float:
        return self._units / self._seconds if self._seconds else float("inf")

    @property
    def measured_per_second(self) -> float:
        """Return units per second, 0 until measured."""
        return self.per_second if self.measured and self._seconds else 0.0

    def seconds(self, units: float) -> float:
        """Return how long `units` are expected to take."""
        return units / self.per_second
