"""Show progress on stderr: as a bar on a terminal, else as lines with times, or in the log if it is JSON."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from pypto_serving.logs import with_fields, writes_json
from pypto_serving.util import format_size

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


logger = logging.getLogger("pypto_serving.api")
_SHOWN = {
    "digests": "digesting weights",
    "weights": "loading weights",
    "programs": "preparing programs",
    "warm-up": "warming up",
    "prepare": "preparing",
}
"""Text shown for each phase of a worker."""
_IN_BYTES = ("weights", "digests", "converting weights")
"""Phases that count bytes; others count steps or blocks."""


class LoadProgress:
    """Called with (phase, done, total); owns the bar on the terminal until `close()`.

    A phase begins when the last one ends, and the first at construction, so the times add up to the total.
    """

    def __init__(self) -> None:
        self._bar = _start_bar() if sys.stderr.isatty() and not writes_json() else None
        self._task: TaskID | None = None
        self._phase = ""
        self._since_s = time.monotonic()
        self._closed = False

    def __call__(self, phase: str, done: int, total: int) -> None:
        if self._closed:
            return
        if phase != self._phase:
            self._finish_phase()
            self._phase = phase
            self._task = self._bar.add_task(_SHOWN.get(phase, phase), total=total, amount="") if self._bar else None
        if self._bar and self._task is not None:
            amount = f"{format_size(done)} of {format_size(total)}" if phase in _IN_BYTES else f"{done} of {total}"
            self._bar.update(self._task, completed=done, total=total, amount=amount)
        if done >= total:
            self._finish_phase()

    def close(self) -> None:
        """Finish the last phase and restore the terminal."""
        self._finish_phase()
        self._closed = True
        if self._bar:
            self._bar.stop()

    def _finish_phase(self) -> None:
        if not self._phase:
            return
        now_s = time.monotonic()
        if self._bar is None:
            shown = _SHOWN.get(self._phase, self._phase)
            took_s = now_s - self._since_s
            if writes_json():
                logger.info("%s: %.2f s", shown, took_s, extra=with_fields(phase=self._phase, took_s=took_s))
            else:
                with suppress(OSError):  # a full disk must not prevent the start
                    print(f"{shown}: {took_s:.2f} s", file=sys.stderr, flush=True)
        self._phase, self._since_s = "", now_s


def _start_bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    amount = TextColumn("{task.fields[amount]}")
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True))
    bar.start()
    return bar
