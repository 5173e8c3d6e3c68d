"""Small tools: clocks, measured rates, backoff, stable hashes, size parsing.

Imports no other module of the package.
"""

from __future__ import annotations

import errno
import hashlib
import json
import operator
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsIndex, TypeVar, cast

import msgspec

T = TypeVar("T")

Clock = Callable[[], float]
"""A source of time in seconds that never decreases, such as time.monotonic."""
GIB = 1 << 30
_SIZE_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": GIB,
    "ti": 1 << 40,
}


class Backoff:
    """Exponential backoff: the wait doubles with each consecutive failure, from `first_s` up to `last_s`."""

    def __init__(self, first_s: float = 1.0, last_s: float = 60.0) -> None:
        self._first_s = self.next_wait_s = first_s
        self._last_s = last_s
        self._retry_s = 0.0

    def fail(self, now_s: float) -> None:
        """Start the wait before the next attempt."""
        self._retry_s = now_s + self.next_wait_s
        self.next_wait_s = min(2 * self.next_wait_s, self._last_s)

    def succeed(self) -> None:
        """Reset the wait after the next failure to `first_s`."""
        self.next_wait_s = self._first_s

    def is_over(self, now_s: float) -> bool:
        """Return whether the wait is over."""
        return now_s >= self._retry_s


class Rate:
    """Units per second with exponential decay: a measurement has 0.9 of the next one's weight. Infinite at first."""

    def __init__(self) -> None:
        self._units = 0.0
        self._seconds = 0.0

    def add(self, units: float, seconds: float) -> None:
        """Record that `units` took `seconds`."""
        self._units = self._units * 0.9 + units
        self._seconds = self._seconds * 0.9 + seconds

    def refuse(self) -> None:
        """Raise the estimate by 5 %, so that a source that seems too slow is tried again later."""
        self._seconds /= 1.05

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
        """Return the expected time for `units`."""
        return units / self.per_second


def write_at(file: int, data: bytes | memoryview, offset: int) -> None:
    """Write all bytes of `data` from `offset` on; raise OSError."""
    left = memoryview(data)
    while left:
        count = os.pwrite(file, left, offset)
        left, offset = left[count:], offset + count


def open_regular(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file. Raises OSError, also for a FIFO or device, whose reader might block, or a folder."""
    file = os.open(path, flags | os.O_NONBLOCK, 0o600)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def read_regular(path: str | Path) -> bytes:
    """Return the content of a regular file. Raises OSError like `open_regular`."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()


def hash128(*parts: bytes) -> bytes:
    """Hash length-prefixed parts with BLAKE2b to 16 bytes, the same in every process and on every machine."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def ceil_div(numerator: int, denominator: int) -> int:
    """Divide and round up."""
    return -(-numerator // denominator)


def parse_size(text: str) -> int:
    """Parse a size such as `512MiB`, `2GiB`, `1.5e9` or `4096` to bytes. Raises ValueError if it is not a size."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][0-9]+)?)\s*([kKmMgGtT]?i?)[bB]?\s*", text)
    if match is None or match[2].lower() not in _SIZE_UNITS:
        raise ValueError(f"{text!r} is not a size; write bytes or a number with a unit, such as 2GiB")
    return int(float(match[1]) * _SIZE_UNITS[match[2].lower()])


def format_size(num_bytes: float) -> str:
    """Format `num_bytes` with a binary unit and up to four significant digits, such as `1.25 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"


def counted(count: int, noun: str) -> str:
    """Format a count with its noun: `1 request`, `2 requests`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def install_extra(extra: str) -> str:
    """Return instructions to install an extra of this package, which is not in any package index."""
    return f"run in the checkout: pip install '.[{extra}]'"


def one_of(texts: Sequence[str]) -> str:
    """Format alternatives: `a`, `a or b`, `a, b or c`."""
    *others, last = texts
    return f"{', '.join(others)} or {last}" if others else last


def brief(value: Any) -> str:
    """Return `repr(value)` for a message, cut to 100 characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # integers of thousands of digits, deep nesting
        text = f"a value of type {type(value).__name__}"
    return cut(text, 100)


def cut(text: str, limit: int) -> str:
    """Return `text`, or its beginning and three dots if it has more than `limit` characters."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def parse_json(text: str | bytes | bytearray) -> Any:
    """Parse JSON of any origin; raise ValueError, also for too deep nesting."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def decode_json(data: str | bytes | bytearray, kind: type[T]) -> T:
    """Parse JSON of any origin as a value of type `kind`; raise ValueError, also for too deep nesting."""
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def whole(value: object) -> int:
    """Convert a whole number of any type, including numpy's, to int. Raises ValueError for others, and for booleans."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(cast(SupportsIndex, value))
    except TypeError:
        raise ValueError(f"{brief(value)} is not a whole number") from None


def entries(value: Any) -> list[Any]:
    """Return the entries of `value`. Raises ValueError for text, bytes, a mapping, or a value that is not iterable."""
    try:
        if isinstance(value, str | bytes | bytearray | memoryview | Mapping):
            raise TypeError
        return list(value)
    except TypeError:
        raise ValueError(f"{brief(value)} is not a list") from None
