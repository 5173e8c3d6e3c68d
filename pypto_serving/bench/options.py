"""Options of a benchmark run, as frozen values that are checked when created.

Every check raises ConfigError that names the command line option, its value, and the allowed values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from pypto_serving.errors import ConfigError
from pypto_serving.types.config import ServerConfig, default_of
from pypto_serving.types.server_url import ServerUrl, parse_server_url
from pypto_serving.util import brief, decode_json

T = TypeVar("T")
Backend = Literal["openai", "openai-chat"]
Metric = Literal["ttft", "tpot", "itl", "e2el"]
RampStrategy = Literal["linear", "exponential"]
LoadName = Literal["max_concurrency", "request_rate"]
"""The field of Traffic that a sweep changes."""

ENDPOINTS: dict[Backend, str] = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
METRICS: tuple[Metric, ...] = ("ttft", "tpot", "itl", "e2el")
WHOLE_REPLY_METRIC: Metric = "e2el"
"""The only latency that can be measured without streaming."""
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


def require_int(option: str, value: int, low: int) -> None:
    """Raise ConfigError if `value` is below `low`."""
    if value < low:
        raise ConfigError(f"{option} must be at least {low}, got {value}")


def require_positive(option: str, value: float, *, infinite: bool = False) -> None:
    """Raise ConfigError for zero, negative numbers, NaN, and infinity unless `infinite`."""
    if not value > 0 or (math.isinf(value) and not infinite):
        wanted = "a number above 0 or inf" if infinite else "a finite number above 0"
        raise ConfigError(f"{option} must be {wanted}, got {value}")


def read_rows(label: str, path: Path, kind: type[T]) -> Iterator[tuple[str, T]]:
    """Yield the rows of a JSONL file, each after its place. Raises ConfigError that names the first bad line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{label} {path}: {error.strerror}; name a readable JSONL file") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{label} {path}, line {number}"
            try:
                row = decode_json(line, kind)
            except ValueError as error:
                raise ConfigError(f"{where}: {error}") from None
            yield where, row


@dataclass(frozen=True, kw_only=True)
class Target:
    """The server under test, and options of every request to it."""

    base_url: str = f"http://{default_of(ServerConfig, 'host')}:{default_of(ServerConfig, 'port')}"
    backend: Backend = "openai"
    endpoint: str = ""
    model: str | None = None
    temperature: float = 0.0
    ignore_eos: bool = False
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 3600.0
    stream: bool = True

    def __post_init__(self) -> None:
        try:
            parse_server_url(self.base_url)
        except ValueError:
            raise ConfigError(f"--base-url must look like http://HOST:PORT, got {brief(self.base_url)}") from None
        if not self.path.startswith("/"):
            raise ConfigError(f"--endpoint must start with a slash, such as /v1/completions; got {self.endpoint!r}")
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"--temperature must be a finite number, 0 or above, got {self.temperature}")
        require_positive("--timeout", self.timeout_s)

    @property
    def url(self) -> ServerUrl:
        return parse_server_url(self.base_url)

    @property
    def path(self) -> str:
        return self.endpoint or ENDPOINTS[self.backend]


@dataclass(frozen=True, kw_only=True)
class RampUp:
    """A request rate that changes from start to end over the run, in requests per second."""

    strategy: RampStrategy
    start_rps: float
    end_rps: float

    def __post_init__(self) -> None:
        require_positive("--ramp-up-start-rps", self.start_rps)
        require_positive("--ramp-up-end-rps", self.end_rps)
        if self.start_rps > self.end_rps:
            raise ConfigError(
                f"--ramp-up-start-rps {self.start_rps:g} is above --ramp-up-end-rps {self.end_rps:g}; swap"
            )

    def rate(self, progress: float) -> float:
        """Return the requests per second once the share `progress` of the requests has been sent."""
        if self.strategy == "linear":
            return self.start_rps + (self.end_rps - self.start_rps) * progress
        return self.start_rps * math.pow(self.end_rps / self.start_rps, progress)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """How many requests arrive, when, and how many may be in flight."""

    num_prompts: int = 1000
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    ramp_up: RampUp | None = None
    num_warmups: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        require_int("--num-prompts", self.num_prompts, 1)
        require_int("--num-warmups", self.num_warmups, 0)
        require_int("--seed", self.seed, 0)
        if self.max_concurrency is not None:
            require_int("--max-concurrency", self.max_concurrency, 1)
        require_positive("--request-rate", self.request_rate, infinite=True)
        require_positive("--burstiness", self.burstiness)
        if self.ramp_up is not None and self.request_rate != math.inf:
            raise ConfigError("--ramp-up-strategy sets the request rate; leave --request-rate out")
        if self.burstiness != 1.0 and self.ramp_up is None and self.request_rate == math.inf:
            raise ConfigError("--burstiness shapes the arrivals of a finite --request-rate; set one or leave it out")


@dataclass(frozen=True, kw_only=True)
class Reporting:
    """Which statistics to report; goodput limits in milliseconds."""

    metrics: Sequence[Metric] = METRICS
    percentiles: Sequence[float] = (99.0,)
    goodput_ms: Mapping[str, float] = field(default_factory=dict)


def require_whole_reply(option: str, metrics: Iterable[str]) -> None:
    """Raise ConfigError for a metric that cannot be measured without a stream."""
    if unknown := [metric for metric in metrics if metric != WHOLE_REPLY_METRIC]:
        raise ConfigError(
            f"{option} names {unknown[0]}, which only streams show, but --disable-stream is given; drop one of them"
        )


def parse_metrics(text: str) -> tuple[Metric, ...]:
    """Parse `ttft,itl` to a tuple in the order of the table."""
    wanted = {name.strip() for name in text.split(",")}
    if unknown := sorted(wanted.difference(METRICS)):
        raise ConfigError(f"--percentile-metrics: unknown metric {unknown[0]!r}; there are: {', '.join(METRICS)}")
    return tuple(name for name in METRICS if name in wanted)


def parse_percentiles(text: str) -> tuple[float, ...]:
    """Parse `50,99.9` to ascending numbers in [0, 100]."""
    try:
        values = sorted({float(part) for part in text.split(",")})
    except ValueError:
        raise ConfigError(f"--metric-percentiles must be numbers such as 50,90,99; got {text!r}") from None
    for value in values:
        if not 0 <= value <= 100:
            raise ConfigError(f"--metric-percentiles must lie in 0 to 100, got {value:g}")
    return tuple(values)


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """Parse `["ttft:200", "tpot:50"]` to limits in milliseconds by metric."""
    limits: dict[str, float] = {}
    for pair in pairs:
        name, _, text = pair.partition(":")
        if name not in GOODPUT_METRICS:
            allowed = ", ".join(GOODPUT_METRICS)
            raise ConfigError(f"--goodput {pair!r}: unknown metric {name!r}; write KEY:MS with one of {allowed}")
        if name in limits:
            raise ConfigError(f"--goodput names {name!r} twice; keep one")
        try:
            limits[name] = float(text)
        except ValueError:
            raise ConfigError(f"--goodput {pair!r}: {text!r} is not a number; write {name}:200 for 200 ms") from None
        require_positive(f"--goodput {name}", limits[name])
    return limits


def parse_metadata(pairs: Sequence[str]) -> dict[str, str]:
    """Parse `["tp=1"]` to a dictionary."""
    metadata: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise ConfigError(f"--metadata must be KEY=VALUE, got {pair!r}")
        metadata[key] = value
    return metadata


def parse_extra_body(text: str) -> dict[str, Any]:
    """Parse a JSON object, to be merged into every request body."""
    try:
        return decode_json(text, dict[str, Any])
    except ValueError as error:
        raise ConfigError(f"--extra-body must be a JSON object, got {brief(text)}: {error}") from None


def parse_loads(flag: str, text: str, kind: type[int] | type[float]) -> list[int] | list[float]:
    """Parse `1,2,4` to positive numbers of type `kind`, ascending. Raises ConfigError."""
    try:
        loads = sorted({kind(part) for part in text.split(",")})
    except ValueError:
        loads = []
    if not loads or not all(0 < load < math.inf for load in loads):
        numbers = "whole numbers" if kind is int else "numbers"
        raise ConfigError(f"{flag} is {text!r}, but must be positive {numbers} such as 1,2,4")
    return loads
