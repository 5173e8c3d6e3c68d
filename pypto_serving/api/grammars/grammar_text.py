"""Write parts of grammars in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pypto_serving.api.grammars.json_schema import SchemaError, close_all, prepare, with_options
from pypto_serving.api.text.tokenizer import Split
from pypto_serving.types.guide import MAX_GRAMMAR_CHARS, Grammar

ANY = "(?s:.*)"
PLACE = "// "
"""Begins a comment with the origin, as a JSON string, of the rules below it."""
_IN_SLASHES = {"/": r"\/", "\n": r"\n", "\r": r"\r", "\\\n": r"\n", "\\\r": r"\r"}


class GrammarText:
    """Owns the rules of one grammar. Raises SchemaError once they are too long.

    Equal rules are written once. Repetitions count towards the length all the same, to bound the work of writing them.
    """

    def __init__(self, split: Split, options: Mapping[str, Any], close_objects: bool = False) -> None:
        """Take llguidance's JSON `options`.

        With `close_objects`, a schema that names properties allows no others: models would add more without end.
        """
        self.split = split
        self._options = options
        self._close_objects = close_objects
        self._place = ""
        self._names: dict[str, str] = {}
        self._places: dict[str, str] = {}
        self._others: list[str] = []
        self._num_chars = 0

    def grammar(self, *first: str) -> Grammar:
        """Return the grammar: the rules `first`, then all added rules."""
        self._count(sum(map(len, first)))
        lines, last = [*first], ""
        for body, name in self._names.items():
            if (place := self._places[body]) != last:
                lines.append(PLACE + json.dumps(place))
            lines.append(name + body)
            last = place
        return Grammar("lark", "\n".join([*lines, *self._others, f"TEXT: /{ANY}/"]))

    @contextmanager
    def at(self, place: str) -> Iterator[None]:
        """Name a place in errors raised within; nested places are joined."""
        before = self._place
        self._place = placed(before, place)
        try:
            yield
        except SchemaError as error:
            raise SchemaError(placed(place, str(error))) from None
        except RecursionError:
            raise SchemaError(placed(place, "it nests too deeply")) from None
        finally:
            self._place = before

    def new(self, body: str, options: str = "") -> str:
        """Add a rule; return its name."""
        return self._add("r", f"{options}: {body}")

    def terminal(self, body: str) -> str:
        """Add a terminal; return its name."""
        return self._add("T", f": {body}")

    def include(self, write: Callable[[str], str]) -> str:
        """Call `write` with a new prefix for names of rules, add the rules it returns, and return the prefix."""
        prefix = f"g{len(self._others)}-"
        self._others.append(f"{PLACE}{json.dumps(self._place)}\n{write(prefix)}")
        self._count(len(self._others[-1]))
        return prefix

    def _add(self, kind: str, body: str) -> str:
        if body not in self._names:
            self._names[body], self._places[body] = f"{kind}{len(self._names)}", self._place
            self._count(len(self._place))
        self._count(len(body))
        return self._names[body]

    def _count(self, num_chars: int) -> None:
        self._num_chars += num_chars
        if self._num_chars > MAX_GRAMMAR_CHARS:
            raise SchemaError(f"the grammar has more than {MAX_GRAMMAR_CHARS} characters up to here; send less")

    def json(self, schema: Mapping[str, Any], options: Mapping[str, Any] | None = None) -> str:
        """Add a rule for JSON that matches a schema, with `options` instead of the usual ones; return its name."""
        made = prepare(schema, self._options if options is None else options, self._close_objects, keep_free=True)
        return self.new("%json " + json.dumps(made))

    def prepared(self, schema: Mapping[str, Any]) -> str:
        """Add a rule for JSON that matches a prepared schema, which contains its definitions; return its name."""
        if self._close_objects:
            close_all(schema, keep_free=True)
        return self.new("%json " + json.dumps(with_options(schema, self._options)))

    def text(self, text: str) -> str:
        """Return the pattern of a fixed text, with special tokens as token ids."""
        return _tokens(self.split(text))

    def until(self, ends: Sequence[str], text: str = "TEXT", spelled: str = "") -> str:
        """Return the pattern of text up to the first of `ends`, inclusive; of any text if there are no ends.

        An end may begin with text and have a special token, spelled `spelled`: the text before may not contain it.
        """
        found, plain = [], []
        for end in ends:
            first, *rest = self.split(end)
            if isinstance(first, int):
                found.append(f"{text} {_tokens([first, *rest])}")
            elif rest:
                before = f"{text} & {without(spelled)}" if spelled else text
                found.append(f"{self.terminal(f'({before}) {json.dumps(first)}')} {_tokens(rest)}")
            else:
                plain.append(json.dumps(end))
        if plain:
            found.append(self.new(f"{text} {any_of(plain)}", "[lazy]"))
        return self.new(any_of(found)) if found else text


def placed(place: str, problem: str) -> str:
    """Put `place` before a problem. A problem that begins with # names a part of a schema, which is appended."""
    if place and problem.startswith("#"):
        return place + problem[1:] if "#" in place else f"{place}: {problem}"
    return ": ".join(filter(None, (place, problem)))


def _tokens(parts: Sequence[str | int]) -> str:
    return " ".join(f"<[{part}]>" if isinstance(part, int) else json.dumps(part) for part in parts)


def joined(*parts: str) -> str:
    """Return the sequence of patterns, without empty ones."""
    return " ".join(filter(None, parts))


def any_of(options: Sequence[str]) -> str:
    """Return the pattern that matches any of `options`."""
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"


def regex(pattern: str) -> str:
    """Return a regular expression between slashes. Raises SchemaError if it ends with a backslash."""
    if len(pattern) - len(pattern.rstrip("\\")) & 1:
        raise SchemaError("a pattern ends with a backslash")
    found = re.sub(r"\\.|[/\n\r]", lambda match: _IN_SLASHES.get(match[0], match[0]), pattern, flags=re.DOTALL)
    return f"/{found or '()'}/"


def literal(text: str) -> str:
    """Return a regular expression that matches `text` alone."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def without(text: str) -> str:
    """Return the terminal of all texts that do not contain `text`."""
    return f"~{regex(ANY + literal(text) + ANY)}"
