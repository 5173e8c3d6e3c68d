"""Turns of the sides of a comparison, their medians, and tables in Markdown."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Side = TypeVar("Side")


def in_turns(sides: Sequence[Side], rounds: int) -> Iterator[tuple[int, Side]]:
    """Yield (round, side) of all rounds; every other round begins with the last side."""
    for number in range(rounds):
        for side in sides if number % 2 == 0 else reversed(sides):
            yield number, side


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def ratios(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Return first / second of each round."""
    return [one / other for one, other in zip(first, second, strict=True)]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return `median (smallest to largest)`."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def quartiles(values: Sequence[float]) -> str:
    """Return `median (first to third quartile)`."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def row(*cells: object) -> str:
    """Return a line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def head(*cells: str) -> str:
    """Return the first two lines of a table."""
    return f"{row(*cells)}\n|{'---|' * len(cells)}"


def table(rows: Sequence[Sequence[object]]) -> str:
    """Return a table whose first row is its heading."""
    return "\n".join([head(*map(str, rows[0])), *(row(*cells) for cells in rows[1:])])
