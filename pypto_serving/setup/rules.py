"""The definition of an option, and rules for its values, which are checked when Options is created."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, get_args

import msgspec

from pypto_serving.logs import LogFormat
from pypto_serving.types.api_keys import read_api_keys
from pypto_serving.types.config import DEFAULT_DRAFTS, LONGEST_MATCH, MAX_DRAFTS, Speculation
from pypto_serving.types.model import SERVING_DTYPES
from pypto_serving.types.tier import POOL_PARAMETERS, parse_pool_url
from pypto_serving.util import decode_json, format_size, parse_size, whole

KERNELS = ("auto", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "portable", "torch")
TOOL_CALL_PARSERS = (
    "auto",
    "none",
    "hermes",
    "qwen3_coder",
    "llama3_json",
    "pythonic",
    "lfm2",
    "olmo3",
    "mistral",
    "mistral_named",
    "granite",
    "kimi_k2",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v4",
    "functools",
    "json",
)
REASONING_PARSERS = ("auto", "none", "qwen3", "deepseek_r1", "mistral")
DTYPES = ("auto", *SERVING_DTYPES)
LOG_FORMATS = get_args(LogFormat)
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
SPEC_METHODS = ("ngram", "mtp")
MAX_TOKENS = 2**31 - 1
MAX_KV_BYTES = 1 << 60
MAX_RANKS = 1024
MAX_PORT = 65535
MAX_SOCKET_PATH = 107
STANDARD_PORTS = {"http": 80, "https": 443}


_UNITS = {"k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}
"""Units of whole numbers, as vLLM writes them."""


def _whole_number(text: str) -> int:
    """Parse `4096`, `32k` or `25.6k`. Raises ValueError."""
    unit = _UNITS.get(text[-1:])
    return int(text) if unit is None else int(float(text[:-1]) * unit)


class OptionRule(Protocol):
    """The values that one option accepts. `parse` raises ValueError; `allowed` completes `but must be ...`."""

    @property
    def allowed(self) -> str: ...

    def parse(self, value: object) -> Any: ...


@dataclass(frozen=True)
class WholeRule:
    """A whole number in [low, high], as a number or as text."""

    low: int
    high: int

    @property
    def allowed(self) -> str:
        return f"a whole number from {self.low} to {self.high}"

    def parse(self, value: object) -> int:
        number = _whole_number(value) if isinstance(value, str) else whole(value)
        if not self.low <= number <= self.high:
            raise ValueError
        return number


@dataclass(frozen=True)
class WholeOrAutoRule(WholeRule):
    """A whole number in [low, high], or `auto`."""

    @property
    def allowed(self) -> str:
        return f"{super().allowed}, or auto"

    def parse(self, value: object) -> Any:
        return value if value == "auto" else super().parse(value)


@dataclass(frozen=True)
class PowerOfTwoRule(WholeRule):
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
class NumberRule:
    """A number of at most `high`, above 0 unless `zero` allows it."""

    high: float
    zero: bool = False
    what: str = "a number of seconds"

    @property
    def allowed(self) -> str:
        return f"{self.what} {'from 0' if self.zero else 'above 0'} to {self.high:g}"

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
class SwitchRule:
    """True or false. With `opt_in`, its flag only turns it on."""

    allowed: str = "true or false"
    opt_in: bool = False

    def parse(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise ValueError
        return value


@dataclass(frozen=True)
class TextRule:
    """Text on one line, not empty; a Path is converted to text."""

    allowed: str = "text on one line, not empty"

    def parse(self, value: object) -> str:
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if not isinstance(value, str) or not value.strip() or not value.isprintable():
            raise ValueError
        return value


@dataclass(frozen=True)
class SocketPathRule(TextRule):
    """The path of a Unix socket."""

    allowed: str = f"a path of at most {MAX_SOCKET_PATH} bytes"

    def parse(self, value: object) -> str:
        path = super().parse(value)
        if len(os.fsencode(path)) > MAX_SOCKET_PATH:
            raise ValueError
        return path


@dataclass(frozen=True)
class TextsRule:
    """One text or a list of them; repeated ones count once."""

    allowed: str = "one or more texts, none of them empty"

    def parse(self, value: object) -> tuple[str, ...]:
        values = (value,) if isinstance(value, str) else value
        if not isinstance(values, list | tuple) or not values:
            raise ValueError
        return tuple(dict.fromkeys(TextRule().parse(item) for item in values))


@dataclass(frozen=True)
class KeysRule(TextsRule):
    """API keys: texts, or JSON objects with a key, a name and limits."""

    allowed: str = "text on one line, not empty"

    def parse(self, value: object) -> tuple[str, ...]:
        texts = super().parse(value)
        read_api_keys(texts)
        return texts


API_KEYS = KeysRule()


@dataclass(frozen=True)
class OriginsRule(TextsRule):
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
class AddressRule(TextRule):
    """Text that matches `pattern`, whose group is a port of at least `lowest`, `*`, or absent."""

    pattern: str = ""
    lowest: int = 1

    def parse(self, value: object) -> str:
        found = re.fullmatch(self.pattern, super().parse(value))
        if found is None or (found[1] not in (None, "*") and not self.lowest <= int(found[1]) <= MAX_PORT):
            raise ValueError
        return found[0]


ZMQ_ENDPOINT = AddressRule(
    "a ZeroMQ endpoint such as tcp://127.0.0.1:5557, tcp://127.0.0.1:* or ipc:///run/kv",
    r"ipc://\S+|tcp://(?:\[\S+\]|[^\s:]+):(\*|[0-9]{1,5})",
    lowest=0,
)
HOST_PORT = AddressRule("an address and a port, such as 10.0.0.1:7000", r"(?:\[[^\s\]]+\]|[^\s:]+):([0-9]{1,5})")
COLLECTOR_URL = AddressRule(
    "the URL of a collector, such as http://127.0.0.1:4317, https://HOST:PORT or grpc://HOST:PORT",
    r"(?:https?|grpc)://(?:\[[^\s\]/]+\]|[^\s:/@]+)(?::([0-9]{1,5}))?(?:/\S*)?",
)
"""Address at which a collector receives traces in the OpenTelemetry protocol."""


@dataclass(frozen=True)
class PoolUrlRule:
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
class SizeRule:
    """A size, kept as int bytes."""

    allowed: str = "a size with a unit such as 20GiB, or a whole number of bytes"

    def parse(self, value: object) -> int:
        number = _bytes_or_fraction(value)
        if isinstance(number, float) or not 1 <= number <= MAX_KV_BYTES:
            raise ValueError
        return number


def _bytes_or_fraction(value: object) -> int | float:
    """Return bytes as int, or a fraction in (0, 1) as float. Raises ValueError for other numbers such as 1.5 or 1.0."""
    number = _number(value) if isinstance(value, str) else value
    if not isinstance(number, float):
        return whole(number)
    if not 0 < number < 1:
        raise ValueError
    return float(number)


def _number(text: str) -> int | float:
    """Parse a number, or a size with a unit; return a float if it has a point or an exponent and no unit."""
    try:
        return float(text) if "." in text or "e" in text.lower() else int(text)
    except ValueError:
        return parse_size(text)


@dataclass(frozen=True)
class ObjectRule:
    """An object of JSON as a mapping or as text."""

    example: str

    @property
    def allowed(self) -> str:
        return f"a mapping or JSON such as {self.example}"

    def parse(self, value: object) -> dict[str, Any]:
        if isinstance(value, str):
            return decode_json(value, dict[str, Any])
        if not isinstance(value, Mapping):
            raise ValueError
        return decode_json(json.dumps(dict(value), allow_nan=False), dict[str, Any])


@dataclass(frozen=True)
class DraftsRule:
    """A mapping with vLLM's keys, or its JSON text."""

    allowed: str = (
        f"""a mapping or JSON such as {{"method": "ngram", "num_speculative_tokens": {DEFAULT_DRAFTS}}}, with no """
        f"keys but method ({' or '.join(SPEC_METHODS)}), num_speculative_tokens (1 to {MAX_DRAFTS}) and, for ngram, "
        f"prompt_lookup_min and prompt_lookup_max (1 to {LONGEST_MATCH}, min <= max)"
    )

    def parse(self, value: object) -> Speculation:
        if isinstance(value, str):
            return msgspec.json.decode(value, type=Speculation)
        return msgspec.convert(value, Speculation)


class Option(NamedTuple):
    """One option.

    rule: the accepted values. An on/off flag has a SwitchRule, a repeatable one a TextsRule.
    help: the help text, without the default.
    default: the fixed default, False if the option is off, None if it depends on the model or the machine. If the table
        gives none, it is the default of the configuration's field of this name, or of this name with `_s`.
    decided: the default in words, or who decides it; "" for a fixed default.
    note: explanation of the fixed default.
    alias: a second name.
    vllm: another name of vLLM, which help does not show; one that begins with `disable_` means the opposite.
    offline: an option of the panel Server that `LLM(...)` also accepts.
    """

    name: str
    rule: OptionRule
    help: str
    metavar: str = ""
    default: Any = None
    decided: str = ""
    note: str = ""
    alias: str = ""
    vllm: str = ""
    offline: bool = False
    panel: str = ""

    @property
    def help_text(self) -> str:
        """Return the help text with the default."""
        return f"{self.help} (default: {self.decided or self._shown_default()})"

    def _shown_default(self) -> str:
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        if isinstance(self.rule, SizeRule):
            return format_size(self.default).replace(" ", "")
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)
