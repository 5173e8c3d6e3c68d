"""The regular expressions of scripts, and how many steps a matcher that goes back needs for them.

The steps are counted, not timed: they are the same on every machine. The matcher does what JavaScript's does, on
Python's parse of the expression.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

BEFORE_EXPRESSION = "(,=:[!&|?{};>/+-*%"
"""Signs behind which a slash begins an expression."""
WORDS_BEFORE = ("return", "typeof", "case")
Rest = Callable[[int], bool]


def expressions(source: str) -> Iterator[tuple[str, str]]:
    """Yield the pattern and the flags of each expression in a script."""
    at, before = 0, "\n"
    templates: list[int] = []  # for each open template literal, the braces that are open in its part
    while at < len(source):
        sign = source[at]
        if source.startswith("//", at):
            at = source.find("\n", at) % (len(source) + 1)
        elif source.startswith("/*", at):
            at = source.index("*/", at) + 2
        elif sign in "\"'":
            at = _behind(source, at + 1, sign)
        elif sign == "`" or (sign == "}" and templates and templates[-1] == 0):
            if sign == "}":
                templates.pop()
            at = _behind_template(source, at + 1, templates)
        elif sign == "/" and (before[-1] in BEFORE_EXPRESSION or before in WORDS_BEFORE):
            end = _behind(source, at + 1, "/", classes=True)
            flags = re.compile("[a-z]*").match(source, end)
            assert flags is not None
            yield source[at + 1 : end - 1], flags[0]
            at = flags.end()
        else:
            if templates and sign in "{}":
                templates[-1] += 1 if sign == "{" else -1
            word = re.compile(r"\w+|\s+|.", re.DOTALL).match(source, at)
            assert word is not None
            at = word.end()
            if word[0].isspace():
                continue
            before = word[0]
            continue
        before = '"'


def _behind(source: str, at: int, close: str, classes: bool = False) -> int:
    """Return where a literal ends that began before `at`."""
    in_class = False
    while source[at] != close or in_class:
        if classes and source[at] in "[]":
            in_class = source[at] == "["
        at += 2 if source[at] == "\\" else 1
    return at + 1


def _behind_template(source: str, at: int, templates: list[int]) -> int:
    """Return where a template literal ends, or its next part begins."""
    while source[at] != "`":
        if source.startswith("${", at):
            templates.append(0)
            return at + 2
        at += 2 if source[at] == "\\" else 1
    return at + 1


def parsed(pattern: str, flags: str) -> Any:
    """Parse an expression of JavaScript: Python writes some things in another way."""
    for theirs, ours in (("(?<", "(?P<"), ("(?P<=", "(?<="), ("(?P<!", "(?<!"), (r"\k<", "(?P="), (r"\/", "/")):
        pattern = pattern.replace(theirs, ours)
    pattern = re.sub(r"\\p\{\w+\}", r"\\w", pattern)
    found = re.IGNORECASE if "i" in flags else 0
    return parser.parse(pattern, found | (re.DOTALL if "s" in flags else 0) | (re.MULTILINE if "m" in flags else 0))


MOST = 60_000


class TooManyStepsError(Exception):
    """An expression took MOST steps."""


class Matcher:
    """Matches a parsed expression, and counts what it tries in `steps`."""

    def __init__(self, tree: Any, sticky: bool = False) -> None:
        self.tree = tree
        self.sticky = sticky
        self.steps = 0
        self.groups: dict[int, tuple[int, int]] = {}

    def count(self, text: str) -> int:
        """Find all matches in `text`, as replaceAll does; return the steps."""
        self.steps, self.text, at = 0, text, 0
        while at <= len(text):
            self.end = -1
            if self._items(list(self.tree), at, self._finish):
                at = max(self.end, at + 1)
            elif self.sticky:
                break
            else:
                at += 1
        return self.steps

    def _finish(self, at: int) -> bool:
        self.end = at
        return True

    def _items(self, items: list[Any], at: int, rest: Rest) -> bool:
        self.steps += 1
        if self.steps > MOST:
            raise TooManyStepsError
        if not items:
            return rest(at)
        (name, value), following = items[0], items[1:]

        def go_on(to: int) -> bool:
            return self._items(following, to, rest)

        match str(name):
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
                least, most, inner = value
                return self._repeat(list(inner), least, most, at, go_on, str(name) == "MIN_REPEAT", 0)
            case "SUBPATTERN":
                number, inner = value[0], list(value[3])
                return self._items(inner, at, lambda to: self._keep(number, at, to) and go_on(to))
            case "BRANCH":
                return any(self._items(list(each), at, go_on) for each in value[1])
            case "ASSERT" | "ASSERT_NOT":
                direction, inner = value
                start = at if direction > 0 else at - inner.getwidth()[1]
                found = start >= 0 and self._items(list(inner), start, lambda to: direction > 0 or to == at)
                return found == (str(name) == "ASSERT") and go_on(at)
            case "AT":
                edge = str(value)
                is_there = at == 0 if "BEGINNING" in edge else at == len(self.text) if "END" in edge else True
                return is_there and go_on(at)
            case "GROUPREF":
                start, end = self.groups.get(value, (0, 0))
                return self.text.startswith(self.text[start:end], at) and go_on(at + end - start)
            case _:
                return at < len(self.text) and takes(name, value, self.text[at]) and go_on(at + 1)

    def _keep(self, number: int | None, start: int, end: int) -> bool:
        if number is not None:
            self.groups[number] = (start, end)
        return True

    def _repeat(self, inner: list[Any], least: int, most: Any, at: int, rest: Rest, lazy: bool, count: int) -> bool:
        def once_more() -> bool:
            return count < most and self._items(
                inner, at, lambda to: to > at and self._repeat(inner, least, most, to, rest, lazy, count + 1)
            )

        if count < least:
            return once_more()
        return (rest(at) or once_more()) if lazy else (once_more() or rest(at))


def takes(name: Any, value: Any, sign: str) -> bool:
    """Whether a part of an expression that takes one character takes `sign`."""
    match str(name):
        case "LITERAL":
            return ord(sign) == value
        case "NOT_LITERAL":
            return ord(sign) != value
        case "RANGE":
            return bool(value[0] <= ord(sign) <= value[1])
        case "CATEGORY":
            kind = str(value).rsplit("_", 1)[-1].lower()
            found = {"digit": sign.isdigit(), "space": sign.isspace(), "word": sign.isalnum() or sign == "_"}[kind]
            return found != ("NOT" in str(value))
        case "IN":
            negated = str(value[0][0]) == "NEGATE"
            return any(takes(*each, sign) for each in value[negated:]) != negated
        case _:
            return True


SIGNS = [chr(code) for code in range(32, 127)] + ["\n", "\u00e9"]


def hostile(tree: Any, count: int) -> Iterator[str]:
    """Yield texts that an expression nearly matches: one repeat goes on `count` times, then something else comes."""
    parts = _repeats(tree)
    for chosen in parts:
        text = _sample(tree, chosen, count)
        for end in ("", "!", "x", " ", "\n", text[-1:], "`"):
            yield text + end
    literals = sorted({sign for part in _single(tree) for sign in SIGNS if takes(*part, sign)}, key=SIGNS.index)
    for sign in (*literals[:12], *literals[-4:], " ", "`", "a", "-", "\n"):
        yield sign * count + "\x00"


def _repeats(tree: Any) -> list[Any]:
    """All repeats, those within others, too."""
    found = []
    for name, value in tree:
        if str(name).endswith("REPEAT"):
            found.append(value)
        for inner in _inner(name, value):
            found += _repeats(inner)
    return found


def _single(tree: Any) -> list[Any]:
    found = []
    for name, value in tree:
        inners = _inner(name, value)
        for inner in inners:
            found += _single(inner)
        if str(name) in ("LITERAL", "IN", "NOT_LITERAL"):
            found.append((name, value))
    return found


def _inner(name: Any, value: Any) -> list[Any]:
    match str(name):
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
            return [value[2]]
        case "SUBPATTERN":
            return [value[3]]
        case "BRANCH":
            return list(value[1])
        case "ASSERT" | "ASSERT_NOT":
            return [value[1]]
        case _:
            return []


def _sample(tree: Any, chosen: Any, count: int) -> str:
    """Return a text that the expression takes, with as few repeats as may be but for `chosen`."""
    text = ""
    for name, value in tree:
        kind = str(name)
        if kind.endswith("REPEAT"):
            least, most, inner = value
            within = any(each is chosen for each in _repeats(inner))
            times = min(count, most) if value is chosen else max(least, 1 if within else 0)
            text += _sample(inner, chosen, count) * int(times)
        elif kind == "SUBPATTERN":
            text += _sample(value[3], chosen, count)
        elif kind == "BRANCH":
            best = [each for each in value[1] if any(part is chosen for part in _repeats(each))]
            text += _sample((best or value[1])[0], chosen, count)
        elif kind in ("LITERAL", "NOT_LITERAL", "IN", "ANY"):
            text += next((sign for sign in (*"a 0-`", *SIGNS) if takes(name, value, sign)), "a")
    return text
