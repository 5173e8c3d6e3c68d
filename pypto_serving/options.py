"""What a user may ask for: one frozen value per option, checked when made; flags, files and Python alike."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlsplit

import msgspec

from pypto_serving.errors import ConfigError
from pypto_serving.util import parse_size

BACKENDS = ("cpu", "null")
KERNELS = ("auto", "avx512_bf16", "avx512", "avx2", "portable", "torch")
DTYPES = ("auto", "float32", "bfloat16")
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
MAX_TOKENS = 2**31 - 1
MAX_KV_BYTES = 1 << 60
MAX_PORT = 65535
POOL_PARAMETERS = ("metadata_server", "protocol", "device", "local_hostname", "segment_size")


class Rule(Protocol):
    """What one option accepts. `parse` raises ValueError; `allowed` ends the sentence `but must be ...`."""

    @property
    def allowed(self) -> str: ...

    def parse(self, value: object) -> Any: ...


@dataclass(frozen=True)
class Whole:
    """A whole number in [low, high], as a number or as text."""

    low: int
    high: int

    @property
    def allowed(self) -> str:
        return f"a whole number from {self.low} to {self.high}"

    def parse(self, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError
        number = int(value)
        if not self.low <= number <= self.high:
            raise ValueError
        return number


@dataclass(frozen=True)
class PowerOfTwo(Whole):
    """A power of two in [low, high]."""

    @property
    def allowed(self) -> str:
        return f"a power of two from {self.low} to {self.high}"

    def parse(self, value: object) -> int:
        number = super().parse(value)
        if number & (number - 1):
            raise ValueError
        return number


@dataclass(frozen=True)
class Seconds:
    """A time of at most `high` seconds, above 0 unless `zero` allows it."""

    high: float
    zero: bool = False

    @property
    def allowed(self) -> str:
        return f"a number of seconds {'from 0' if self.zero else 'above 0'} to {self.high:g}"

    def parse(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        number = float(value)
        if not (0 < number <= self.high or (self.zero and number == 0)):
            raise ValueError
        return number


@dataclass(frozen=True)
class Choice:
    """One of a few names."""

    names: tuple[str, ...]

    @property
    def allowed(self) -> str:
        return "one of " + ", ".join(self.names)

    def parse(self, value: object) -> str:
        if value not in self.names:
            raise ValueError
        return str(value)


@dataclass(frozen=True)
class Switch:
    """True or false."""

    allowed: str = "true or false"

    def parse(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise ValueError
        return value


@dataclass(frozen=True)
class Text:
    """Text on one line, not empty; a path stands for its text."""

    allowed: str = "text on one line, not empty"

    def parse(self, value: object) -> str:
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if not isinstance(value, str) or not value.strip() or not value.isprintable():
            raise ValueError
        return value


@dataclass(frozen=True)
class Texts:
    """One text or a list of them; repeated ones count once."""

    allowed: str = "one or more texts, none of them empty"

    def parse(self, value: object) -> tuple[str, ...]:
        values = (value,) if isinstance(value, str) else value
        if not isinstance(values, list | tuple) or not values:
            raise ValueError
        return tuple(dict.fromkeys(Text().parse(item) for item in values))


@dataclass(frozen=True)
class Endpoint:
    """An address that ZeroMQ can bind."""

    allowed: str = "a ZeroMQ endpoint such as tcp://127.0.0.1:5557, tcp://127.0.0.1:* or ipc:///run/kv"

    def parse(self, value: object) -> str:
        found = re.fullmatch(r"ipc://\S+|tcp://(?:\[\S+\]|[^\s:]+):(\*|[0-9]{1,5})", Text().parse(value))
        if found is None or (found[1] not in (None, "*") and int(found[1]) > MAX_PORT):
            raise ValueError
        return found[0]


def parse_pool_url(url: str) -> tuple[str, int | None, dict[str, str]]:
    """Host, port and parameters of `mooncake://HOST[:PORT][?NAME=VALUE&...]`. Raises ValueError."""
    parts = urlsplit(url)
    given = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    if parts.scheme != "mooncake" or not parts.hostname or parts.path.strip("/") or parts.fragment:
        raise ValueError(f"{url} is no address of a pool")
    if not given.keys() <= set(POOL_PARAMETERS):
        raise ValueError(f"{url} has unknown parameters")
    parse_size(given.get("segment_size", "0"))
    return parts.hostname, parts.port, given


@dataclass(frozen=True)
class PoolUrl:
    """Where a pool of blocks is."""

    allowed: str = (
        "mooncake://HOST:PORT, perhaps with ?NAME=VALUE&... where NAME is one of "
        f"{', '.join(POOL_PARAMETERS)} (a size such as 1GiB)"
    )

    def parse(self, value: object) -> str:
        url = Text().parse(value)
        parse_pool_url(url)
        return url


@dataclass(frozen=True)
class Memory:
    """A size, kept as int bytes, or a fraction in (0, 1), kept as float."""

    allowed: str = (
        "a size such as 2GiB, a number of bytes, or a fraction of the free memory between 0 and 1 such as 0.3"
    )

    def parse(self, value: object) -> int | float:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        number = _number(value)
        if 0 < number < 1:
            return float(number)
        if not 1 <= number <= MAX_KV_BYTES:
            raise ValueError
        return int(number)


@dataclass(frozen=True)
class Size:
    """A size, kept as int bytes."""

    allowed: str = "a size such as 20GiB, or a number of bytes"

    def parse(self, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError
        number = int(_number(value))
        if not 1 <= number <= MAX_KV_BYTES:
            raise ValueError
        return number


def _number(value: int | float | str) -> float:
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return parse_size(value)


RULES: dict[str, Rule] = {
    "model": Text(),
    "served_model_name": Texts(),
    "chat_template": Text(),
    "backend": Choice(BACKENDS),
    "dtype": Choice(DTYPES),
    "kernels": Choice(KERNELS),
    "packed_cache": Switch(),
    "num_threads": Whole(1, 1024),
    "seed": Whole(0, 2**63 - 1),
    "log_level": Choice(LOG_LEVELS),
    "max_model_len": Whole(2, MAX_TOKENS),
    "max_num_seqs": Whole(1, 65536),
    "max_num_batched_tokens": Whole(1, 1 << 20),
    "long_prefill_token_threshold": Whole(0, MAX_TOKENS),
    "chunked_prefill": Switch(),
    "block_size": PowerOfTwo(1, 1024),
    "kv_memory": Memory(),
    "prefix_caching": Switch(),
    "kv_host_memory": Memory(),
    "kv_disk": Text(),
    "kv_disk_size": Size(),
    "kv_remote": PoolUrl(),
    "kv_store": Choice(("through", "eviction")),
    "kv_events": Endpoint(),
    "kv_events_replay": Endpoint(),
    "host": Text(),
    "port": Whole(0, MAX_PORT),
    "api_key": Text(),
    "max_queued_requests": Whole(1, 1_000_000),
    "drain_timeout": Seconds(86400, zero=True),
    "step_timeout": Seconds(86400),
    "log_requests": Switch(),
}


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the user gave; None means not given. Values are checked and normalised when the struct is made.

    `config_file` and `from_file` say which values a configuration file gave. Raises ConfigError, in one line,
    naming the option, its value and what is allowed.
    """

    model: str | None = None
    served_model_name: tuple[str, ...] | None = None
    chat_template: str | None = None
    backend: str | None = None
    dtype: str | None = None
    kernels: str | None = None
    packed_cache: bool | None = None
    num_threads: int | None = None
    seed: int | None = None
    log_level: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    long_prefill_token_threshold: int | None = None
    chunked_prefill: bool | None = None
    block_size: int | None = None
    kv_memory: int | float | None = None
    prefix_caching: bool | None = None
    kv_host_memory: int | float | None = None
    kv_disk: str | None = None
    kv_disk_size: int | None = None
    kv_remote: str | None = None
    kv_store: str | None = None
    kv_events: str | None = None
    kv_events_replay: str | None = None
    host: str | None = None
    port: int | None = None
    api_key: str | None = None
    max_queued_requests: int | None = None
    drain_timeout: float | None = None
    step_timeout: float | None = None
    log_requests: bool | None = None
    config_file: str = ""
    from_file: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name, rule in RULES.items():
            value = getattr(self, name)
            if value is not None:
                msgspec.structs.force_setattr(self, name, self._parse(name, rule, value))

    def _parse(self, name: str, rule: Rule, value: object) -> Any:
        try:
            return rule.parse(value)
        except (ValueError, OverflowError):
            shown = _shorten(str(value)) or "empty"
            raise ConfigError(f"{self.label(name)} is {shown}, but must be {rule.allowed}") from None

    def label(self, name: str) -> str:
        """How to call option `name` in a message: the flag, or the key of the configuration file."""
        if name in self.from_file:
            return f"{flag(name)} in {self.config_file}"
        return "MODEL" if name == "model" else "--" + flag(name)

    def origin(self, name: str) -> str:
        """Where the value of option `name` came from, as the reason of a setting."""
        return f"given in {self.config_file}" if name in self.from_file else f"given by {self.label(name)}"


def flag(name: str) -> str:
    """`max_model_len` as users write it: `max-model-len`."""
    return name.replace("_", "-")


def make_options(
    given: Mapping[str, Any], file_values: Mapping[str, Any] | None = None, config_file: str = ""
) -> Options:
    """Options from values `given` directly, which win, and those of a configuration file.

    None counts as not given; names may be written with dashes. Raises ConfigError for a bad value, and for an
    unknown name, with the closest one.
    """
    direct = _known(given, "")
    filed = _known(file_values or {}, f" in {config_file}")
    from_file = frozenset(filed.keys() - direct.keys())
    return Options(**{**filed, **direct}, config_file=config_file, from_file=from_file)


def _known(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    known: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in RULES:
            close = difflib.get_close_matches(name, RULES, n=1)
            hint = f"did you mean {flag(close[0])}?" if close else "known are: " + ", ".join(map(flag, RULES))
            raise ConfigError(f"unknown option {_shorten(repr(key))}{where}; {hint}")
        if value is not None:
            known[name] = value
    return known


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 80 else line[:77] + "..."
