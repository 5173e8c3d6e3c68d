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
"""What begins the comment that says, as a JSON text, what the rules below it are from."""
_IN_SLASHES = {"/": r"\/", "\n": r"\n", "\r": r"\r", "\\\n": r"\n", "\\\r": r"\r"}


class GrammarText:
    """Owns the rules of one grammar. Raises SchemaError once they are too long.

    Equal rules are written once, but count each time, so that the work is bounded, too.
    """

    def __init__(self, split: Split, options: Mapping[str, Any], close_objects: bool = False) -> None:
        """Take llguidance's `options` for JSON.

        With `close_objects`, objects have no properties but those they name, if they name any: models would add more
        without end.
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
        """Return the grammar that begins with some rules."""
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
        """Add rules that `write` returns for what their names must begin with; return that."""
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
        """Write JSON of a schema, maybe with other options."""
        made = prepare(schema, self._options if options is None else options, self._close_objects, keep_free=True)
        return self.new("%json " + json.dumps(made))

    def prepared(self, schema: Mapping[str, Any]) -> str:
        """Write JSON of a schema that is prepared, with all definitions that it refers to."""
        if self._close_objects:
            close_all(schema, keep_free=True)
        return self.new("%json " + json.dumps(with_options(schema, self._options)))

    def text(self, text: str) -> str:
        """Write a text, in which special tokens stand for themselves."""
        return _tokens(self.split(text))

    def until(self, ends: Sequence[str], text: str = "TEXT", spelled: str = "") -> str:
        """Write text up to the first of `ends`, inclusive; any text if there are none.

        If an end begins with text and has a special token, no text may spell that token, which is `spelled`.
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
    """Put a place before a problem, or before a place within it: parts of a schema begin with #."""
    if place and problem.startswith("#"):
        return place + problem[1:] if "#" in place else f"{place}: {problem}"
    return ": ".join(filter(None, (place, problem)))


def _tokens(parts: Sequence[str | int]) -> str:
    return " ".join(f"<[{part}]>" if isinstance(part, int) else json.dumps(part) for part in parts)


def joined(*parts: str) -> str:
    """Write what follows each other; "" is nothing."""
    return " ".join(filter(None, parts))


def any_of(options: Sequence[str]) -> str:
    """Write one of `options`."""
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"


def regex(pattern: str) -> str:
    """Write a regular expression between slashes. Raises SchemaError if it ends with a backslash."""
    if len(pattern) - len(pattern.rstrip("\\")) & 1:
        raise SchemaError("a pattern ends with a backslash")
    found = re.sub(r"\\.|[/\n\r]", lambda match: _IN_SLASHES.get(match[0], match[0]), pattern, flags=re.DOTALL)
    return f"/{found or '()'}/"


def literal(text: str) -> str:
    """Return a regular expression that matches `text` alone."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def without(text: str) -> str:
    """Write the terminal of all texts that do not hold `text`."""
    return f"~{regex(ANY + literal(text) + ANY)}"
