"""The definition of an option, and rules for its values, which are checked when Options is created."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

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


Kind = Literal[
    "switch", "flag", "choice", "whole", "whole or text", "number", "memory", "object", "path", "text", "texts"
]
"""What a rule takes in Python. The command line has a switch for `switch`, one that only turns it on for `flag`."""


@dataclass(frozen=True)
class Rule:
    """The values that one option accepts. `parse` raises ValueError; `allowed` completes `but must be ...`."""

    allowed: str
    parse: Callable[[object], Any]
    kind: Kind = "text"
    names: tuple[str, ...] = ()

    @property
    def is_switch(self) -> bool:
        """Return whether the values are True and False."""
        return self.kind in ("switch", "flag")


def _require(fits: bool) -> None:
    if not fits:
        raise ValueError


def integer(low: int, high: int) -> Rule:
    """Accept a whole number in [low, high], as a number or as text."""

    def parse(value: object) -> int:
        number = _whole_number(value) if isinstance(value, str) else whole(value)
        _require(low <= number <= high)
        return number

    return Rule(f"a whole number from {low} to {high}", parse, "whole")


def integer_or_auto(low: int, high: int) -> Rule:
    """Accept a whole number in [low, high], or `auto`."""
    plain = integer(low, high)

    def parse(value: object) -> int | str:
        return "auto" if value == "auto" else int(plain.parse(value))

    return Rule(f"{plain.allowed}, or auto", parse, "whole or text")


def power_of_two(low: int, high: int) -> Rule:
    """Accept a power of two in [low, high]."""
    plain = integer(low, high)

    def parse(value: object) -> int:
        power: int = plain.parse(value)
        _require(power & (power - 1) == 0)
        return power

    return Rule(f"a power of two from {low} to {high}", parse, "whole")


def number(high: float, zero: bool = False, what: str = "a number of seconds") -> Rule:
    """Accept a number of at most `high`, above 0 unless `zero` allows it."""

    def parse(value: object) -> float:
        given = float(value if isinstance(value, float | str) else whole(value))
        _require(0 < given <= high or (zero and given == 0))
        return given

    return Rule(f"{what} {'from 0' if zero else 'above 0'} to {high:g}", parse, "number")


def choice(*names: str) -> Rule:
    """Accept one of a few names."""

    def parse(value: object) -> str:
        _require(value in names)
        return str(value)

    return Rule("one of " + ", ".join(names), parse, "choice", names)


def _truth(value: object) -> bool:
    _require(isinstance(value, bool))
    return bool(value)


SWITCH, FLAG = Rule("true or false", _truth, "switch"), Rule("true or false", _truth, "flag")


def _text(value: object) -> str:
    """Return text on one line, not empty; a Path is converted to text."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ValueError
    return value


def _socket_path(value: object) -> str:
    path = _text(value)
    _require(len(os.fsencode(path)) <= MAX_SOCKET_PATH)
    return path


def _texts(value: object) -> tuple[str, ...]:
    """Return one text or a list of them as a tuple; repeated ones count once."""
    values = (value,) if isinstance(value, str) else value
    if not isinstance(values, list | tuple) or not values:
        raise ValueError
    return tuple(dict.fromkeys(map(_text, values)))


def _keys(value: object) -> tuple[str, ...]:
    """Return API keys: texts, or JSON objects with a key, a name and limits."""
    texts = _texts(value)
    read_api_keys(texts)
    return texts


TEXT = Rule("text on one line, not empty", _text, "path")
SOCKET_PATH = Rule(f"a path of at most {MAX_SOCKET_PATH} bytes", _socket_path)
TEXTS = Rule("one or more texts, none of them empty", _texts, "texts")
API_KEYS = Rule("text on one line, not empty", _keys, "texts")


def _origin(text: str) -> str:
    """Return the origin of web pages as browsers send it: in lower case, without the scheme's own port."""
    if text == "*":
        return text
    pattern = r"([a-z][a-z0-9+.-]*)://([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?"
    found = re.fullmatch(pattern, text.lower())
    if found is None:
        raise ValueError
    scheme, host, port = found[1], found[2], int(found[3] or 0)
    _require(port <= MAX_PORT)
    return f"{scheme}://{host}" + (f":{port}" if port not in (0, STANDARD_PORTS.get(scheme)) else "")


ORIGINS = Rule(
    "one or more of scheme://host or scheme://host:port, without a path or a slash at the end, or *",
    lambda value: tuple(dict.fromkeys(map(_origin, _texts(value)))),
    "texts",
)


def _address(allowed: str, pattern: str, lowest: int = 1) -> Rule:
    """Accept text that matches `pattern`, whose group is a port of at least `lowest`, `*`, or absent."""

    def parse(value: object) -> str:
        found = re.fullmatch(pattern, _text(value))
        if found is None or (found[1] not in (None, "*") and not lowest <= int(found[1]) <= MAX_PORT):
            raise ValueError
        return found[0]

    return Rule(allowed, parse)


ZMQ_ENDPOINT = _address(
    "a ZeroMQ endpoint such as tcp://127.0.0.1:5557, tcp://127.0.0.1:* or ipc:///run/kv",
    r"ipc://\S+|tcp://(?:\[\S+\]|[^\s:]+):(\*|[0-9]{1,5})",
    lowest=0,
)
HOST_PORT = _address("an address and a port, such as 10.0.0.1:7000", r"(?:\[[^\s\]]+\]|[^\s:]+):([0-9]{1,5})")
COLLECTOR_URL = _address(
    "the URL of a collector, such as http://127.0.0.1:4317, https://HOST:PORT or grpc://HOST:PORT",
    r"(?:https?|grpc)://(?:\[[^\s\]/]+\]|[^\s:/@]+)(?::([0-9]{1,5}))?(?:/\S*)?",
)
"""Address at which a collector receives traces in the OpenTelemetry protocol."""


def _pool_url(value: object) -> str:
    url = _text(value)
    parse_pool_url(url)
    return url


POOL_URL = Rule(
    "mooncake://HOST:PORT, perhaps with ?NAME=VALUE&... where NAME is one of "
    f"{', '.join(POOL_PARAMETERS)} (a size such as 1GiB)",
    _pool_url,
)


def _memory(value: object) -> int | float:
    """Return a size as int bytes, or a fraction in (0, 1) as float. Raises ValueError for others, such as 1.0."""
    given = _number(value) if isinstance(value, str) else value
    given = given if isinstance(given, float) else whole(given)
    _require(0 < given < 1 if isinstance(given, float) else 0 < given <= MAX_KV_BYTES)
    return given


def _number(text: str) -> int | float:
    """Parse a number, or a size with a unit; return a float if it has a point or an exponent and no unit."""
    try:
        return float(text) if "." in text or "e" in text.lower() else int(text)
    except ValueError:
        return parse_size(text)


def _size(value: object) -> int:
    num_bytes = _memory(value)
    _require(isinstance(num_bytes, int))
    return int(num_bytes)


MEMORY = Rule(
    "a size with a unit such as 2GiB, a whole number of bytes, or a fraction of the free memory, below 1, such as 0.3",
    _memory,
    "memory",
)
SIZE = Rule("a size with a unit such as 20GiB, or a whole number of bytes", _size, "whole or text")


def json_object(example: str) -> Rule:
    """Accept an object of JSON as a mapping or as text."""

    def parse(value: object) -> dict[str, Any]:
        if isinstance(value, Mapping):
            value = json.dumps(dict(value), allow_nan=False)
        if not isinstance(value, str):
            raise ValueError
        return decode_json(value, dict[str, Any])

    return Rule(f"a mapping or JSON such as {example}", parse, "object")


def _drafts(value: object) -> Speculation:
    """Read a mapping with vLLM's keys, or its JSON text."""
    if isinstance(value, str):
        return msgspec.json.decode(value, type=Speculation)
    return msgspec.convert(value, Speculation)


DRAFTS = Rule(
    f"""a mapping or JSON such as {{"method": "ngram", "num_speculative_tokens": {DEFAULT_DRAFTS}}}, with no """
    f"keys but method ({' or '.join(SPEC_METHODS)}), num_speculative_tokens (1 to {MAX_DRAFTS}) and, for ngram, "
    f"prompt_lookup_min and prompt_lookup_max (1 to {LONGEST_MATCH}, min <= max)",
    _drafts,
    "object",
)


class Option(NamedTuple):
    """One option.

    rule: the accepted values. An on/off flag has SWITCH or FLAG, a repeatable one TEXTS.
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
    rule: Rule
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
        if self.rule is SIZE:
            return format_size(self.default).replace(" ", "")
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)
