"""Read calls written as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, NoReturn

from pypto_serving.api.chat.parsers.scanner import OutputScanner, Steps, find, meets, past_space, to_json

_STRING_END = {quote: re.compile(rf"{quote}|\\.", re.DOTALL) for quote in "\"'"}
_JSON = re.compile(r'["{}\[\]]|[^\s\w:,.+\-]')
_PYTHON = re.compile(r"""["'(){}\[\]]""")


class BracketScanner:
    """Find the end of a value that begins with a bracket, counting brackets outside of strings.

    `at` is how far the text was read: with `done` the end of the value, else everything before it is certain. `depth`
    is the number of open brackets. A character that JSON has in strings only is `broken`: the value ends before it.
    """

    def __init__(self, at: int = 0, depth: int = 0, python: bool = False) -> None:
        self.at = at
        self.done = self.broken = False
        self._depth = depth
        self._outside = _PYTHON if python else _JSON
        self._quote = ""

    def advance(self, text: str) -> bool:
        """Read on in `text`, which begins as it did before; return `done`."""
        while not self.done:
            found = (_STRING_END[self._quote] if self._quote else self._outside).search(text, self.at)
            if found is None:
                self.at = len(text) - (1 if self._quote and text.endswith("\\", self.at) else 0)
                break
            self._meet(found)
        return self.done

    def _meet(self, found: re.Match[str]) -> None:
        char = found[0]
        self.at = found.end()
        if self._quote:
            self._quote = self._quote if char != self._quote else ""
        elif char in "\"'":
            self._quote = char
        elif char in "([{":
            self._depth += 1
        elif char in ")]}":
            self._depth -= 1
            self.done = self._depth <= 0
        else:
            self.at = found.start()
            self.done = self.broken = True


MAX_HEAD, MAX_TAIL = 4096, 256
"""Characters of a call before and after its arguments."""
_STRING = r'"((?:[^"\\]|\\.)*)"'
_ARGUMENTS = ("arguments", "parameters")
_BESIDE = r'"(?:id|type)"\s*:\s*"[^"\\]*"'
_HEAD = re.compile(
    rf'\{{\s*(?:{_BESIDE}\s*,\s*)*"name"\s*:\s*{_STRING}\s*,\s*"(?:{"|".join(_ARGUMENTS)})"\s*:\s*(?=\{{)'
)
_TAIL = re.compile(rf"(?:\s*,\s*{_BESIDE})*\s*\}}")
_FIRST_KEY = re.compile(rf"\{{\s*(?:{_STRING}|[^\s\"])")
_KEYS = {"name", "id", "type", *_ARGUMENTS}
SPACE = r"[\s\x1c-\x1f]*"
"""White space of Python, also for engines that count less as such."""
FIRST_KEY = rf'\{{{SPACE}"(?:(?:{"|".join(sorted(_KEYS))})"|[^"]*\\)'
"""What a call begins with; a key with an escape may be any."""

Names = Collection[str] | None
"""The tools that a call may name; None for any."""


def read_call(scanner: OutputScanner, at: int, names: Names = None) -> Steps[bool]:
    """Read the call at `at`, and consume all up to its end; without a call there, consume nothing and return False.

    Arguments are given out as they come if the name stands before them, else once the call is complete.
    """
    brackets = BracketScanner(at)
    while True:
        head = _HEAD.match(scanner.text, at, at + MAX_HEAD)
        if head is not None:
            name = _unquoted(head[1])
            if name is None or not _may_call(name, names):
                return False
            scanner.call(name)
            scanner.drop(head.end())
            yield from stream_arguments(scanner)
            yield from _end_call(scanner)
            return True
        if not _may_begin(scanner.text, at):
            return False
        if brackets.advance(scanner.text):
            return not brackets.broken and _whole_call(scanner, at, brackets.at, names)
        if scanner.ended:
            return False
        yield


def read_calls(scanner: OutputScanner, at: int, names: Names = None, separator: str = "") -> Steps[bool]:
    """Read one call after the other, with white space and maybe a `separator` between them; tell if there was one."""
    found = False
    while True:
        at = yield from past_space(scanner, at)
        if found and separator and scanner.text.startswith(separator, at):
            at = yield from past_space(scanner, at + len(separator))
        if not (yield from read_call(scanner, at, names)):
            return found
        found, at = True, 0


def read_array(scanner: OutputScanner, at: int, names: Names = None) -> Steps[bool]:
    """Read a JSON array of calls, or a call alone, like `read_calls`."""
    at = yield from past_space(scanner, at)
    in_array = scanner.text.startswith("[", at)
    if not (yield from read_calls(scanner, at + in_array, names, ",")):
        return False
    at = yield from past_space(scanner)
    if in_array and scanner.text.startswith("]", at):
        scanner.drop(at + 1)
    return True


def stream_arguments(scanner: OutputScanner) -> Steps[None]:
    """Give out the JSON value at the beginning of the scanner as arguments, as it comes."""
    brackets = BracketScanner()
    while not brackets.advance(scanner.text) and not scanner.ended:
        scanner.argue(brackets.at)
        brackets.at = 0
        yield
    scanner.argue(brackets.at if brackets.done else len(scanner.text))


def read_head(
    scanner: OutputScanner, at: int, pattern: re.Pattern[str], until: str, most: int
) -> Steps[re.Match[str] | None]:
    """Match `pattern` at `at` once `until` is there, within `most` characters."""
    while until not in scanner.text[at : at + most] and len(scanner.text) < at + most and not scanner.ended:
        yield
    return pattern.match(scanner.text, at, at + most)


def end_of_value(scanner: OutputScanner, mark: str, at: int, opens: str) -> Steps[int]:
    """Return where `mark` ends the value at `at`; -1 if nowhere.

    JSON that begins with one of the characters `opens` may hold the mark in its strings; other text may not.
    """
    begin = yield from past_space(scanner, at)
    if begin < len(scanner.text) and scanner.text[begin] in opens:
        brackets = BracketScanner(begin)
        while not brackets.advance(scanner.text) and not scanner.ended:
            yield
        if brackets.done and is_json(scanner.text[begin : brackets.at]):
            end = yield from past_space(scanner, brackets.at)
            if (yield from meets(scanner, end, mark)):
                return end
    return (yield from find(scanner, mark, at))


def is_json(text: str) -> bool:
    """Tell whether a text is JSON."""
    return json_type(text) is not None


def json_type(text: str) -> type | None:
    """Return the type of a JSON text's value; None if it is none. Numbers may have any number of digits."""
    try:
        return type(_TYPES.decode(text))
    except (ValueError, RecursionError):
        return None


def load_json(text: str) -> Any:
    """Return the value of a JSON text; None if it is none."""
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return None


def refuse_constant(constant: str) -> NoReturn:
    """Raise ValueError for what Python takes for a number, but JSON does not."""
    raise ValueError(f"{constant} is not JSON")


_TYPES = json.JSONDecoder(parse_int=lambda digits: 0, parse_constant=refuse_constant)


def _may_begin(text: str, at: int) -> bool:
    """Tell whether what stands at `at` may become a call."""
    if not text.startswith("{", at):
        return at == len(text)
    first = _FIRST_KEY.match(text, at, at + MAX_HEAD)
    return first is None or _unquoted(first[1] or "") in _KEYS


def _may_call(name: str, names: Names) -> bool:
    return bool(name) and name.isprintable() and (names is None or name in names)


def _whole_call(scanner: OutputScanner, at: int, end: int, names: Names) -> bool:
    """Read a complete object whose arguments come before its name, are text, or are missing."""
    value = load_json(scanner.text[at:end])
    if not isinstance(value, dict) or not _KEYS.issuperset(value):
        return False
    name, given = value.get("name"), [value[key] for key in _ARGUMENTS if key in value]
    arguments = given[0] if len(given) == 1 else ({} if names is None and not given else None)
    if isinstance(arguments, str):
        arguments = load_json(arguments)
    if not isinstance(name, str) or not _may_call(name, names) or not isinstance(arguments, dict):
        return False
    scanner.call(name)
    scanner.arguments(to_json(arguments))
    scanner.drop(end)
    return True


def _end_call(scanner: OutputScanner) -> Steps[None]:
    """Consume the rest of a call whose arguments were given out. What does not belong there stays."""
    brackets = BracketScanner(depth=1)
    while not brackets.advance(scanner.text):
        if scanner.ended or len(scanner.text) > MAX_TAIL:
            return
        yield
    if brackets.at <= MAX_TAIL and _TAIL.fullmatch(scanner.text, 0, brackets.at):
        scanner.drop(brackets.at)


def _unquoted(text: str) -> str | None:
    """Return what the inside of a JSON string stands for; None if it is none."""
    value = load_json(f'"{text}"')
    return value if isinstance(value, str) else None
