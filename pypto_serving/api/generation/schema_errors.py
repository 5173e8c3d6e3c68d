"""Say in the words of JSON Schema, and with the place, why a grammar does not compile."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from pypto_serving import guidance
from pypto_serving.types.guide import Grammar

_AT_LINE = re.compile(r"at (\d+)\(\d+\): failed to compile JSON schema: (.*)", re.DOTALL)
Says = Callable[[Any], bool]


def checked(grammar: Grammar) -> Grammar:
    """Return a grammar that compiles, as `guidance.checked` does. Raises GrammarError, with places in schemas."""
    try:
        return guidance.checked(grammar)
    except guidance.GrammarError as error:
        if grammar.syntax == "regex":
            raise guidance.GrammarError(re.sub(r"^at \d+\(\d+\): ", "", str(error))) from None
        message, schema = _of_schema(str(error), grammar)
        said = None if schema is None else explained(message, schema)
        if said is None:
            raise
        raise guidance.GrammarError(said, code="unsupported_schema") from None


def _of_schema(message: str, grammar: Grammar) -> tuple[str, Any]:
    """Return what a message says of a schema, and that schema: the whole grammar, or the one on a line of Lark."""
    if grammar.syntax == "json_schema":
        return message, json.loads(grammar.text)
    found = _AT_LINE.fullmatch(message)
    line = grammar.text.split("\n")[int(found[1]) - 1] if found is not None else ""
    _, mark, schema = line.partition("%json ")
    if found is None or not mark:
        return message, None
    with suppress(ValueError):
        return found[2], json.JSONDecoder().raw_decode(schema)[0]
    return message, None


def explained(message: str, schema: Mapping[str, Any]) -> str | None:
    """Return what a message of llguidance about a schema means; None if that is not known."""

    def place(name: str, says: Says) -> str:
        return next((at for at, key, value in _keywords(schema) if key == name and says(value)), f"#/…/{name}")

    if found := re.fullmatch(r"Unknown format: (.*)", message, re.DOTALL):
        shown = found[1]
        return f"{place('format', lambda v: v == shown)} cannot be enforced: the format {shown} is not supported"
    if message.startswith("oneOf constraints are not supported"):
        return f"{place('oneOf', bool)} cannot be enforced: its cases may overlap; use anyOf"
    if found := re.fullmatch(r"patternProperty regexes /(.*)/ and /(.*)/ are not disjoint", message, re.DOTALL):
        both = {found[1], found[2]}
        where = place("patternProperties", lambda v: isinstance(v, dict) and both <= v.keys())
        return f"{where} cannot be enforced: the patterns {found[1]} and {found[2]} may overlap"
    if message == "Unsatisfiable schema: anyOf is empty":
        empty = (at for at, key, value in _keywords(schema) if key == "anyOf" and value == [])
        return f"{next(empty, '#')} is an empty list, which nothing satisfies"
    if found := re.fullmatch(r"Unsatisfiable schema: (.*)", message, re.DOTALL):
        return f"nothing satisfies this schema: {found[1]}"
    return None


def _schemas(schema: Any, at: str) -> Iterator[tuple[str, Any]]:
    """Yield a schema and those in it, with their places."""
    yield at, schema
    for name, value in schema.items() if isinstance(schema, dict) else ():
        if name in ("additionalProperties", "items"):
            yield from _schemas(value, f"{at}/{name}")
        elif name in ("properties", "patternProperties", "$defs") and isinstance(value, dict):
            for key, each in value.items():
                yield from _schemas(each, f"{at}/{name}/{key}")
        elif name in ("allOf", "anyOf", "oneOf", "prefixItems") and isinstance(value, list):
            for i, each in enumerate(value):
                yield from _schemas(each, f"{at}/{name}/{i}")


def _keywords(schema: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield all keywords of a schema, each with its place before it."""
    for at, each in _schemas(schema, "#"):
        for name, value in each.items() if isinstance(each, dict) else ():
            yield f"{at}/{name}", name, value
