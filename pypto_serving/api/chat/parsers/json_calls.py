"""Read calls written as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator
from typing import Any, NoReturn, TypeVar

from pypto_serving.api.chat.parsers.scanner import OutputScanner, Steps, drop_if, past_space, to_json

T = TypeVar("T")
Give = Callable[[str], None]
SPACE = r"[\s\x1c-\x1f]*"
"""White space of Python, also for engines that count less as such."""
_ARGUMENTS = ("arguments", "parameters")
_KEYS = {"name", "id", "type", *_ARGUMENTS}
FIRST_KEY = rf'\{{{SPACE}"(?:(?:{"|".join(sorted(_KEYS))})"|[^"]*\\)'
"""What a call begins with; a key with an escape may be any."""
_ESCAPE = r"(?:[\"\\/bfnrt]|u[0-9a-fA-F]{4})"
_INSIDE = {'"': re.compile(rf'(?:[^"\\]+|\\{_ESCAPE})*'), "'": re.compile(rf"(?:[^'\\]+|\\(?:'|{_ESCAPE}))*")}
_OPEN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_TO_ESCAPE = {'"': re.compile(r"[\x00-\x1f]"), "'": re.compile(r"""\\[^']|(\\')|["\x00-\x1f]""")}
_WORD = re.compile(r"[\w.+-]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_CONSTANTS = {"true", "false", "null"}
_VALUE = '{["v'
_PYTHON_STRING = {quote: re.compile(rf"{quote}|\\.", re.DOTALL) for quote in "\"'"}
_BRACKET = re.compile(r"""["'(){}\[\]]""")

Names = Collection[str] | None
"""The tools that a call may name; None for any."""


class BracketScanner:
    """Find the end of a value that begins with a bracket or a quote, counting brackets outside of strings.

    `at` is how far the text was read: with `done` the end of the value, else everything before it is certain.
    """

    def __init__(self, at: int) -> None:
        self.at = at
        self.done = False
        self.depth = 0
        self._quote = ""

    def advance(self, text: str) -> bool:
        """Read on in `text`, which begins as it did before; return `done`."""
        while not self.done:
            found = (_PYTHON_STRING[self._quote] if self._quote else _BRACKET).search(text, self.at)
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
            self.done = not self._quote and self.depth == 0
        elif char in "\"'":
            self._quote = char
        else:
            self.depth += 1 if char in "([{" else -1
            self.done = self.depth <= 0


def read_json(scanner: OutputScanner, give: Give, wanted: str = "{") -> Steps[bool]:
    """Consume one value, and `give` it as JSON while it comes; False where it breaks.

    `wanted`: the characters with which the value may begin, `v` for numbers and constants.
    """
    opened, at = "", 0
    while True:
        begin = at
        at = yield from past_space(scanner, at)
        give("".join(filter(" \t\r\n".__contains__, scanner.text[begin:at])))
        char = scanner.text[at : at + 1]
        kind = '"' if char == "'" and not scanner.exact else char if char in '{}[]:,"' else "v"
        if not char or kind not in wanted:
            scanner.drop(at)
            return False
        if kind == "v" or kind == '"':
            scanner.drop(at + (kind == '"'))
            at = 0
            is_key = "v" not in wanted
            if not (yield from (_read_word(scanner, give) if kind == "v" else read_string(scanner, give, char))):
                return False
            if is_key:
                wanted = ":"
                continue
        else:
            give(char)
            at += 1
            if char in "{[":
                opened += char
                wanted = '"}' if char == "{" else _VALUE + "]"
                continue
            if char in ":,":
                wanted = '"' if char == "," and opened[-1] == "{" else _VALUE
                continue
            opened = opened[:-1]
        if not opened:
            scanner.drop(at)
            return True
        wanted = ",}" if opened[-1] == "{" else ",]"


def read_string(scanner: OutputScanner, give: Give, quote: str) -> Steps[bool]:
    """Consume the rest of a string after its `quote`, and `give` it as JSON while it comes; False where it breaks."""
    give('"')
    while True:
        inside = _INSIDE[quote].match(scanner.text)
        assert inside is not None
        give(_TO_ESCAPE[quote].sub(_escaped, inside[0]))
        scanner.drop(inside.end())
        if scanner.text.startswith(quote):
            scanner.drop(1)
            give('"')
            return True
        if scanner.ended or not (scanner.text == "" or _OPEN_ESCAPE.match(scanner.text)):
            return False
        yield


def _escaped(found: re.Match[str]) -> str:
    """Return how JSON writes what only Python has in strings."""
    text = found[0]
    return "'" if text == "\\'" else text if text.startswith("\\") else json.dumps(text)[1:-1]


def _read_word(scanner: OutputScanner, give: Give) -> Steps[bool]:
    while True:
        found = _WORD.match(scanner.text)
        assert found is not None
        if found.end() < len(scanner.text) or scanner.ended:
            break
        yield
    word = _PYTHON.get(found[0], found[0])
    if word not in _CONSTANTS and not _NUMBER.fullmatch(word):
        return False
    give(word)
    scanner.drop(found.end())
    return True


def read_call(scanner: OutputScanner, names: Names = None) -> Steps[bool]:
    """Read a call that is one object. Arguments that come before the name are given out after it."""
    if not (yield from drop_if(scanner, "{")):
        return False
    arguments: list[str] | None = None
    keys: list[str] = []

    def give(text: str) -> None:
        assert arguments is not None
        arguments.append(text)
        if "name" in keys:
            scanner.arguments(text)

    while not keys or (yield from drop_if(scanner, ",")):
        key = yield from _read_text(scanner)
        key = "arguments" if key in _ARGUMENTS else key
        if key not in _KEYS or key in keys or not (yield from drop_if(scanner, ":")):
            return False
        keys.append(key)
        if key == "arguments":
            arguments = []
            if not (yield from read_arguments(scanner, give)):
                return False
        else:
            text = yield from _read_text(scanner)
            if text is None or (key == "name" and not may_call(text, names)):
                return False
            if key == "name":
                scanner.call(text)
                scanner.arguments("".join(arguments or ()))
    if "name" not in keys or (arguments is None and names is not None):
        return False
    if arguments is None:
        scanner.arguments("{}")
    if (yield from drop_if(scanner, "}")):
        return keys[-1] != "arguments" or (yield from end_braces(scanner, arguments or []))
    return keys[-1] == "arguments" and _is_flat(arguments or [], {"id", "type"})


def read_array(scanner: OutputScanner, names: Names = None) -> Steps[bool]:
    """Read an array of calls, or a call alone."""
    in_array = closed = False
    while (yield from drop_if(scanner, "[")):
        in_array = True
    if not (yield from read_call(scanner, names)):
        return False
    while (yield from drop_if(scanner, ",")):
        if not (yield from read_call(scanner, names)):
            return False
    while (yield from drop_if(scanner, "]")):
        closed = True
    at = yield from past_space(scanner)
    return closed or not in_array or scanner.text[at : at + 1] in ("", "[", "`")


def read_arguments(scanner: OutputScanner, give: Give) -> Steps[bool]:
    """Read the arguments of a call: an object, also as a text; or null, which stands for none."""
    at = yield from past_space(scanner)
    scanner.drop(at)
    if scanner.text.startswith("{"):
        return (yield from read_json(scanner, give))
    given: list[str] = []
    if not (yield from read_json(scanner, given.append, '"v')):
        return False
    value = load_json("".join(given))
    value = load_json(loosened(value) or "") if isinstance(value, str) else {} if given[-1] == "null" else None
    give(to_json(value))
    return isinstance(value, dict)


def end_braces(scanner: OutputScanner, arguments: list[str]) -> Steps[bool]:
    """Consume a brace too many after `arguments`; False if it may belong within them."""
    return not (yield from drop_if(scanner, "}")) or _is_flat(arguments)


def _is_flat(arguments: list[str], without: Collection[str] = ()) -> bool:
    """Tell whether arguments hold no object, nor any of the keys `without`."""
    value = load_json("".join(arguments))
    return isinstance(value, dict) and not value.keys() & set(without) and "{" not in _outside_strings(arguments)[1:]


def _outside_strings(arguments: list[str]) -> str:
    return re.sub(r'"(?:[^"\\]|\\.)*"', "", "".join(arguments)).strip()


def _read_text(scanner: OutputScanner) -> Steps[str | None]:
    """Read a string; None if there is none."""
    given: list[str] = []
    at = yield from past_space(scanner)
    scanner.drop(at)
    quote = scanner.text[:1]
    if not quote or quote not in ('"' if scanner.exact else "\"'"):
        return None
    scanner.drop(1)
    whole = yield from read_string(scanner, given.append, quote)
    value = load_json("".join(given)) if whole else None
    return value if isinstance(value, str) else None


def read_head(
    scanner: OutputScanner, at: int, pattern: re.Pattern[str], until: str, most: int
) -> Steps[re.Match[str] | None]:
    """Match `pattern` at `at` once `until` is there, within `most` characters."""
    while until not in scanner.text[at : at + most] and len(scanner.text) < at + most and not scanner.ended:
        yield
    return pattern.match(scanner.text, at, at + most)


def loosened(text: str) -> str | None:
    """Return the JSON that `text` stands for; None if it is not one value."""
    scanner, given = OutputScanner(), list[str]()
    scanner.text, scanner.ended = text.strip(), True
    whole = finished(read_json(scanner, given.append, _VALUE))
    return "".join(given) if whole and not scanner.text else None


def finished(steps: Generator[None, None, T]) -> T:
    """Return the result of steps that need not wait for text."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


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


def may_call(name: str, names: Names) -> bool:
    """Tell whether `name` is one that a call may have."""
    return bool(name) and name.isprintable() and (names is None or name in names)
