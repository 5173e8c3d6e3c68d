"""Log the requests that connections refuse, of which there may be thousands."""

from __future__ import annotations

import logging
import math

from pypto_serving.logs import with_fields
from pypto_serving.util import Clock, counted

logger = logging.getLogger("pypto_serving.api")

QUIET_S = 10.0


class Refusals:
    """Log one line for each reason in QUIET_S, with the number of refusals since the line before.

    Reasons are few: none has what a client sent.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._told: dict[str, tuple[float, int]] = {}
        """When a reason was logged, and how often it came since then."""

    def note(self, status: int, reason: str) -> None:
        """Log a refusal, or count it for the next line."""
        told_s, count = self._told.get(reason, (-math.inf, 0))
        count += 1
        if self._clock() - told_s < QUIET_S:
            self._told[reason] = told_s, count
            return
        self._told[reason] = self._clock(), 0
        fields = with_fields(status=status, refused=count)
        line = (counted(count, "request"), status, reason, QUIET_S)
        logger.warning("refused %s with a %d: %s (said at most every %g s)", *line, extra=fields)
