"""Allowances: what the holders of API keys use, and may use."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pypto_serving.errors import RequestError
from pypto_serving.types.api_keys import KeyLimits
from pypto_serving.util import Clock

MINUTE_S = 60.0
REASONS = ("requests", "tokens", "concurrent")


class KeyLimitError(RequestError):
    """The holder of the key has used up one of its limits; try again in `retry_after_s` seconds."""

    status = 429
    code = "rate_limit_exceeded"

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(f"{message}; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class Bucket:
    """A minute's worth of units that refills steadily. May be overdrawn."""

    def __init__(self, size: int, clock: Clock) -> None:
        self.size = size
        self._clock = clock
        self._left, self._at_s = float(size), clock()

    def left(self) -> float:
        """Return the units that may be used now."""
        now_s = self._clock()
        self._left = min(self.size, self._left + (now_s - self._at_s) * self.size / MINUTE_S)
        self._at_s = now_s
        return self._left

    def take(self, count: int) -> None:
        """Use units."""
        self._left = self.left() - count

    def wait_s(self, wanted: float) -> int:
        """Return the whole seconds until `wanted` units are left."""
        return math.ceil(max(0.0, wanted - self.left()) * MINUTE_S / self.size)


class Allowance:
    """What the holder of a name uses. Owned by ApiKeys; used in the event loop's thread only.

    The prompt counts when a request is admitted, the output when it ends. So a request is admitted while any tokens are
    left, however many it will use, and what it uses beyond is missing later.
    """

    def __init__(self, name: str, limits: KeyLimits, clock: Clock) -> None:
        self.name = name
        self.running = 0
        self.used: Counter[str] = Counter()
        self.refused: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self._clock = clock
        self.change(limits)

    def change(self, limits: KeyLimits) -> None:
        """Set the limits; minutes that have begun start anew if they differ."""
        if getattr(self, "limits", None) != limits:
            self.limits = limits
            sizes = {"requests": limits.requests_per_minute, "tokens": limits.tokens_per_minute}
            self._buckets = {unit: Bucket(size, self._clock) for unit, size in sizes.items() if size is not None}

    def require(self) -> None:
        """Raise KeyLimitError if another request would exceed a limit."""
        most = self.limits.max_concurrent
        if most is not None and self.running >= most:
            self.refused["concurrent"] += 1
            raise KeyLimitError(f"{self.name!r} may have {most} unfinished requests at once, and has them", 1)
        for unit, bucket in self._buckets.items():
            if wait_s := bucket.wait_s(1):
                self.refused[unit] += 1
                raise KeyLimitError(f"{self.name!r} may use {bucket.size} {unit} in a minute, and has", wait_s)

    def enter(self, num_prompt: int) -> None:
        """Record a request with so many tokens in its prompts, which `require` let through."""
        self.running += 1
        self._use("requests", 1)
        self._use("tokens", num_prompt, "prompt_tokens")

    def leave(self, num_output: int) -> None:
        """Record the end of an admitted request."""
        self.running -= 1
        self._use("tokens", num_output, "generation_tokens")

    def _use(self, unit: str, count: int, counted_as: str = "") -> None:
        self.used[counted_as or unit] += count
        if unit in self._buckets:
            self._buckets[unit].take(count)

    def headers(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the headers in which OpenAI's clients look for limits."""
        for unit, bucket in self._buckets.items():
            values = {
                "limit": bucket.size,
                "remaining": max(0, int(bucket.left())),
                "reset": bucket.wait_s(bucket.size),
            }
            for what, value in values.items():
                yield f"x-ratelimit-{what}-{unit}".encode(), f"{value}{'s' * (what == 'reset')}".encode()


ALLOWANCE: ContextVar[Allowance | None] = ContextVar("allowance", default=None)
"""That of the key that the current request came with."""


class KeyMetrics(Collector):
    """The metrics of holders of keys, by their names."""

    def __init__(self, allowances: Callable[[], Iterable[Allowance]]) -> None:
        self._allowances = allowances

    def collect(self) -> Iterator[Metric]:
        """Yield nothing where there are no keys."""
        if not (holders := list(self._allowances())):
            return
        unfinished = "Unfinished requests of a key's holder."
        gauge = GaugeMetricFamily("pypto:key_requests_running", unfinished, labels=["key"])
        for holder in holders:
            gauge.add_metric([holder.name], holder.running)
        yield gauge
        for what in ("requests", "prompt_tokens", "generation_tokens"):
            help_text = f"{what.replace('_', ' ').capitalize()} of a key's holder."
            counter = CounterMetricFamily(f"pypto:key_{what}", help_text, labels=["key"])
            for holder in holders:
                counter.add_metric([holder.name], holder.used[what])
            yield counter
        help_text = "Requests that a limit of the key's holder refused."
        refused = CounterMetricFamily("pypto:key_refusals", help_text, labels=["key", "limit"])
        for holder in holders:
            for reason, count in holder.refused.items():
                refused.add_metric([holder.name, reason], count)
        yield refused
