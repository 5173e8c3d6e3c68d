"""Write parts of grammars in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pypto_serving.api.generation.json_schema import SchemaError, prepare
from pypto_serving.api.generation.structured import literal
from pypto_serving.types.guide import MAX_GRAMMAR_CHARS

SpecialId = Callable[[str], int | None]
"""Returns the id of a text that is a special token; None for others."""
ANY = "(?s:.*)"


class TooLongError(SchemaError):
    """A grammar that has too many characters."""

    def __init__(self) -> None:
        super().__init__(f"they make more than {MAX_GRAMMAR_CHARS} characters of grammar")


class GrammarText:
    """Owns the rules of one grammar. Raises TooLongError once they are too long."""

    def __init__(self, marks: Sequence[str], special_id: SpecialId, options: Mapping[str, Any]) -> None:
        """`marks` are texts that may be special tokens, `options` llguidance's for JSON."""
        self._marks = {mark: token_id for mark in marks if (token_id := special_id(mark)) is not None}
        self._options = options
        self._names: dict[str, str] = {}
        self._num_chars = 0

    def __str__(self) -> str:
        return "\n".join([*(name + body for body, name in self._names.items()), f"TEXT: /{ANY}/"])

    def new(self, body: str, options: str = "") -> str:
        """Add a rule; return its name."""
        return self._add("r", f"{options}: {body}")

    def terminal(self, body: str) -> str:
        """Add a terminal; return its name."""
        return self._add("T", f": {body}")

    def _add(self, kind: str, body: str) -> str:
        if body not in self._names:
            self._names[body] = f"{kind}{len(self._names)}"
            self._num_chars += len(body)
            if self._num_chars > MAX_GRAMMAR_CHARS:
                raise TooLongError
        return self._names[body]

    def json(self, schema: Mapping[str, Any]) -> str:
        """Write JSON of a schema, without properties that it does not name, which models would add without end."""
        return "%json " + json.dumps(prepare(schema, self._options, close_objects=True, keep_free=True))

    def text(self, text: str) -> str:
        """Write a text, in which special tokens stand for themselves."""
        before, token_id, after = self.split(text)
        if token_id is None:
            return json.dumps(text) if text else ""
        return " ".join(filter(None, [self.text(before), f"<[{token_id}]>", self.text(after)]))

    def split(self, text: str) -> tuple[str, int | None, str]:
        """Return what stands before the first special token of a text, its id, and what stands behind it."""
        for mark, token_id in self._marks.items():
            if mark in text:
                before, _, after = text.partition(mark)
                return before, token_id, after
        return text, None, ""

    def until(self, end: str, text: str = "TEXT", spelled: str = "") -> str:
        """Write text up to the first `end`, inclusive. If `end` has a special token, no text may spell it `spelled`."""
        before, token_id, after = self.split(end)
        if token_id is None:
            return self.new(f"{text} {json.dumps(end)}", "[lazy]")
        if not before:
            return " ".join(filter(None, [text, f"<[{token_id}]>", self.text(after)]))
        plain = self.terminal(f"{text} & {without(spelled)}") if spelled else text
        piece = self.new(f"{plain} {json.dumps(before)}", "[lazy]")
        return " ".join(filter(None, [f"{piece}+", f"<[{token_id}]>", self.text(after)]))


def regex(pattern: str) -> str:
    """Write a regular expression. Raises SchemaError if it is none that could stand there."""
    if len(pattern) - len(pattern.rstrip("\\")) & 1:
        raise SchemaError("a pattern ends with a backslash")
    pattern = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], pattern, flags=re.DOTALL)
    return "/" + pattern.replace("\n", r"\n").replace("\r", r"\r") + "/"


def without(text: str) -> str:
    """Write the terminal of all texts that do not hold `text`."""
    return f"~{regex(ANY + literal(text) + ANY)}"
