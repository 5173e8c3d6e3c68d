"""Rules: the values that each option accepts, checked when Options is made."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any, Protocol, get_args

import msgspec

from pypto_serving.backend.defaults import BACKEND_DEFAULTS
from pypto_serving.logs import LogFormat
from pypto_serving.types.config import Activations, Head
from pypto_serving.types.drafts import DEFAULT_DRAFTS, LONGEST_MATCH, MAX_DRAFTS, Speculation
from pypto_serving.types.model import SERVING_DTYPES
from pypto_serving.types.tier import POOL_PARAMETERS, StorePolicy, parse_pool_url
from pypto_serving.util import parse_size, whole

KERNELS = ("auto", "avx512_bf16", "avx512", "avx2", "portable", "torch")
TOOL_CALL_PARSERS = (
    "auto",
    "none",
    "hermes",
    "qwen3_coder",
    "llama3_json",
    "pythonic",
    "mistral",
    "mistral_named",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v4",
    "json",
)
REASONING_PARSERS = ("auto", "none", "qwen3", "deepseek_r1", "mistral")
DTYPES = ("auto", *SERVING_DTYPES)
SPEC_METHODS = ("ngram", "mtp")
LOG_FORMATS = get_args(LogFormat)
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
MAX_TOKENS = 2**31 - 1
MAX_KV_BYTES = 1 << 60
MAX_RANKS = 1024
MAX_PORT = 65535
MAX_SOCKET_PATH = 107
STANDARD_PORTS = {"http": 80, "https": 443}


class Rule(Protocol):
    """The values that one option accepts. `parse` raises ValueError; `allowed` ends the sentence `but must be ...`."""

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
        number = int(value) if isinstance(value, str) else whole(value)
        if not self.low <= number <= self.high:
            raise ValueError
        return number


@dataclass(frozen=True)
class WholeOrAuto(Whole):
    """A whole number in [low, high], or `auto`."""

    @property
    def allowed(self) -> str:
        return f"{super().allowed}, or auto"

    def parse(self, value: object) -> Any:
        return value if value == "auto" else super().parse(value)


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
        number = float(value if isinstance(value, float | str) else whole(value))
        if not (0 < number <= self.high or (self.zero and number == 0)):
            raise ValueError
        return number


@dataclass(frozen=True)
class ChoiceRule:
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
class TextRule:
    """Text on one line, not empty; a path stands for its text."""

    allowed: str = "text on one line, not empty"

    def parse(self, value: object) -> str:
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if not isinstance(value, str) or not value.strip() or not value.isprintable():
            raise ValueError
        return value


@dataclass(frozen=True)
class SocketPath(TextRule):
    """The path of a Unix socket."""

    allowed: str = f"a path of at most {MAX_SOCKET_PATH} bytes"

    def parse(self, value: object) -> str:
        path = super().parse(value)
        if len(os.fsencode(path)) > MAX_SOCKET_PATH:
            raise ValueError
        return path


@dataclass(frozen=True)
class Texts:
    """One text or a list of them; repeated ones count once."""

    allowed: str = "one or more texts, none of them empty"

    def parse(self, value: object) -> tuple[str, ...]:
        values = (value,) if isinstance(value, str) else value
        if not isinstance(values, list | tuple) or not values:
            raise ValueError
        return tuple(dict.fromkeys(TextRule().parse(item) for item in values))


@dataclass(frozen=True)
class Keys(Texts):
    """API keys: one, or a list of them."""

    allowed: str = "text on one line, not empty"


@dataclass(frozen=True)
class Origins(Texts):
    """Origins of web pages, written as browsers send them: in lower case, without the scheme's own port; `*` is any."""

    allowed: str = "one or more of scheme://host or scheme://host:port, without a path or a slash at the end, or *"

    def parse(self, value: object) -> tuple[str, ...]:
        return tuple(dict.fromkeys(map(_origin, super().parse(value))))


def _origin(text: str) -> str:
    if text == "*":
        return text
    pattern = r"([a-z][a-z0-9+.-]*)://([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?"
    found = re.fullmatch(pattern, text.lower())
    if found is None:
        raise ValueError
    scheme, host, port = found[1], found[2], int(found[3] or 0)
    if port > MAX_PORT:
        raise ValueError
    return f"{scheme}://{host}" + (f":{port}" if port not in (0, STANDARD_PORTS.get(scheme)) else "")


@dataclass(frozen=True)
class EndpointRule:
    """An address that ZeroMQ can bind."""

    allowed: str = "a ZeroMQ endpoint such as tcp://127.0.0.1:5557, tcp://127.0.0.1:* or ipc:///run/kv"

    def parse(self, value: object) -> str:
        found = re.fullmatch(r"ipc://\S+|tcp://(?:\[\S+\]|[^\s:]+):(\*|[0-9]{1,5})", TextRule().parse(value))
        if found is None or (found[1] not in (None, "*") and int(found[1]) > MAX_PORT):
            raise ValueError
        return found[0]


@dataclass(frozen=True)
class HostPort:
    """Where another host connects."""

    allowed: str = "an address and a port, such as 10.0.0.1:7000"

    def parse(self, value: object) -> str:
        found = re.fullmatch(r"(?:\[[^\s\]]+\]|[^\s:]+):([0-9]{1,5})", TextRule().parse(value))
        if found is None or not 0 < int(found[1]) <= MAX_PORT:
            raise ValueError
        return found[0]


@dataclass(frozen=True)
class PoolUrl:
    """The URL of a pool of blocks."""

    allowed: str = (
        "mooncake://HOST:PORT, perhaps with ?NAME=VALUE&... where NAME is one of "
        f"{', '.join(POOL_PARAMETERS)} (a size such as 1GiB)"
    )

    def parse(self, value: object) -> str:
        url = TextRule().parse(value)
        parse_pool_url(url)
        return url


@dataclass(frozen=True)
class TracesUrl:
    """Where a collector takes traces in the OpenTelemetry protocol."""

    allowed: str = "the URL of a collector, such as http://127.0.0.1:4317, https://HOST:PORT or grpc://HOST:PORT"

    def parse(self, value: object) -> str:
        url = TextRule().parse(value)
        found = re.fullmatch(r"(?:https?|grpc)://(?:\[[^\s\]/]+\]|[^\s:/@]+)(?::([0-9]{1,5}))?(?:/\S*)?", url)
        if found is None or not 0 < int(found[1] or 1) <= MAX_PORT:
            raise ValueError
        return url


@dataclass(frozen=True)
class MemoryRule:
    """A size, kept as int bytes, or a fraction in (0, 1), kept as float."""

    allowed: str = (
        "a size with a unit such as 2GiB, a whole number of bytes, or a fraction of the free memory, below 1, "
        "such as 0.3"
    )

    def parse(self, value: object) -> int | float:
        number = _bytes_or_fraction(value)
        if not 0 < number <= MAX_KV_BYTES:
            raise ValueError
        return number


@dataclass(frozen=True)
class Size:
    """A size, kept as int bytes."""

    allowed: str = "a size with a unit such as 20GiB, or a whole number of bytes"

    def parse(self, value: object) -> int:
        number = _bytes_or_fraction(value)
        if isinstance(number, float) or not 1 <= number <= MAX_KV_BYTES:
            raise ValueError
        return number


def _bytes_or_fraction(value: object) -> int | float:
    """Return bytes as int, or a fraction in (0, 1) as float; raise ValueError for other numbers such as 1.5 or 1.0."""
    number = _number(value) if isinstance(value, str) else value
    if not isinstance(number, float):
        return whole(number)
    if not 0 < number < 1:
        raise ValueError
    return float(number)


def _number(text: str) -> int | float:
    """Return the number or the size with a unit that `text` is; float if it has a point or an exponent and no unit."""
    try:
        return float(text) if "." in text or "e" in text.lower() else int(text)
    except ValueError:
        return parse_size(text)


@dataclass(frozen=True)
class Drafts:
    """A mapping with vLLM's keys, or JSON of one."""

    allowed: str = (
        f"""a mapping or JSON such as {{"method": "ngram", "num_speculative_tokens": {DEFAULT_DRAFTS}}}, with no """
        f"keys but method ({' or '.join(SPEC_METHODS)}), num_speculative_tokens (1 to {MAX_DRAFTS}) and, for ngram, "
        f"prompt_lookup_min and prompt_lookup_max (1 to {LONGEST_MATCH}, min <= max)"
    )

    def parse(self, value: object) -> Speculation:
        if isinstance(value, str):
            return msgspec.json.decode(value, type=Speculation)
        return msgspec.convert(value, Speculation)


SERVER_OPTIONS = frozenset(
    {
        "served_model_name",
        "host",
        "port",
        "uds",
        "ssl_certfile",
        "ssl_keyfile",
        "api_key",
        "drain_timeout",
        "max_body_bytes",
        "batch_dir",
        "access_log",
        "log_requests",
        "max_log_len",
        "otlp_traces_endpoint",
        "client_priority",
        "trust_request_chat_template",
        "allowed_origins",
    }
)
"""Options of the HTTP server alone."""

RULES: dict[str, Rule] = {
    "model": TextRule(),
    "served_model_name": Texts(),
    "chat_template": TextRule(),
    "tool_call_parser": ChoiceRule(TOOL_CALL_PARSERS),
    "reasoning_parser": ChoiceRule(REASONING_PARSERS),
    "trust_request_chat_template": Switch(),
    "backend": ChoiceRule(tuple(BACKEND_DEFAULTS)),
    "npu_platform": ChoiceRule(BACKEND_DEFAULTS["npu"].platforms),
    "dtype": ChoiceRule(DTYPES),
    "activations": ChoiceRule(("auto", *get_args(Activations))),
    "head": ChoiceRule(get_args(Head)),
    "kernels": ChoiceRule(KERNELS),
    "packed_cache": Switch(),
    "num_threads": Whole(1, 1024),
    "data_parallel_size": Whole(1, MAX_RANKS),
    "tensor_parallel_size": WholeOrAuto(1, MAX_RANKS),
    "pipeline_parallel_size": Whole(1, MAX_RANKS),
    "expert_parallel_size": Whole(1, MAX_RANKS),
    "join_address": HostPort(),
    "join_secret_file": TextRule(),
    "seed": Whole(0, 2**63 - 1),
    "log_level": ChoiceRule(LOG_LEVELS),
    "log_format": ChoiceRule(LOG_FORMATS),
    "max_model_len": Whole(2, MAX_TOKENS),
    "max_num_seqs": Whole(1, 65536),
    "max_num_batched_tokens": Whole(1, 1 << 20),
    "long_prefill_token_threshold": Whole(0, MAX_TOKENS),
    "chunked_prefill": Switch(),
    "fair_scheduling": Switch(),
    "speculative_config": Drafts(),
    "spec_method": ChoiceRule(("off", *SPEC_METHODS)),
    "spec_tokens": Whole(1, MAX_DRAFTS),
    "block_size": PowerOfTwo(1, 1024),
    "kv_dtype": ChoiceRule(("auto", "bf16", "int8")),
    "kv_memory": MemoryRule(),
    "prefix_caching": Switch(),
    "kv_host_memory": MemoryRule(),
    "kv_disk": TextRule(),
    "kv_disk_size": Size(),
    "kv_remote": PoolUrl(),
    "kv_store": ChoiceRule(get_args(StorePolicy)),
    "kv_events": EndpointRule(),
    "kv_events_replay": EndpointRule(),
    "host": TextRule(),
    "port": Whole(0, MAX_PORT),
    "uds": SocketPath(),
    "ssl_certfile": TextRule(),
    "ssl_keyfile": TextRule(),
    "api_key": Keys(),
    "max_queued_requests": Whole(1, 1_000_000),
    "max_queued_tokens": Whole(0, MAX_TOKENS),
    "drain_timeout": Seconds(86400, zero=True),
    "step_timeout": Seconds(86400),
    "max_body_bytes": Size(),
    "batch_dir": TextRule(),
    "access_log": Switch(),
    "log_requests": Switch(),
    "max_log_len": Whole(0, MAX_TOKENS),
    "otlp_traces_endpoint": TracesUrl(),
    "client_priority": Switch(),
    "allowed_origins": Origins(),
}
