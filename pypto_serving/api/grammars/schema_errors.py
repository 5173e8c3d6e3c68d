"""Explain, in the terms of JSON Schema and with the place, why a grammar does not compile."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from pypto_serving import guidance
from pypto_serving.api.grammars.grammar_text import PLACE, placed
from pypto_serving.api.grammars.json_schema import subschemas
from pypto_serving.types.guide import Grammar

MAX_TRIED = 32
"""Compile at most this many parts of a grammar separately, to find the one at fault."""
_AT_LINE = re.compile(r"at (\d+)\(\d+\): (?:failed to compile JSON schema: )?(.*)", re.DOTALL)
_RULE = re.compile(r"([\w-]+)(?:\[[^\]]*\])?:")


def checked(grammar: Grammar) -> Grammar:
    """Check a grammar like `guidance.checked`, and return it. Raises GrammarError that names the place at fault."""
    try:
        return guidance.checked(grammar)
    except guidance.GrammarError as error:
        raise _explained(error, grammar) from None


def _explained(error: guidance.GrammarError, grammar: Grammar) -> guidance.GrammarError:
    message, schema, place = str(error), None, ""
    if grammar.syntax == "json_schema":
        schema = json.loads(grammar.text)
    elif found := _AT_LINE.fullmatch(message):
        lines = grammar.text.split("\n")[: int(found[1])]
        schema, place = _schema_in(lines[-1]), _place_of(lines)
        if schema is not None or place or grammar.syntax == "regex":
            message = found[2]
    elif grammar.syntax == "lark" and (alone := _culprit(grammar)) is not None:
        place, message = alone
    said = None if schema is None else explained(message, schema)
    code = error.code if said is None else "unsupported_schema"
    return guidance.GrammarError(placed(place, said or message), code=code)


def _schema_in(line: str) -> Any:
    """Return the schema on a line of Lark, or None."""
    _, mark, schema = line.partition("%json ")
    with suppress(ValueError):
        return json.JSONDecoder().raw_decode(schema)[0] if mark else None
    return None


def _place_of(lines: Sequence[str]) -> str:
    """Return the place in the request from which the last line of Lark was made; "" if no comment names it."""
    comment = next((line for line in reversed(lines) if line.startswith(PLACE)), "")
    with suppress(ValueError):
        return str(json.loads(comment.removeprefix(PLACE)))
    return ""


def _culprit(grammar: Grammar) -> tuple[str, str] | None:
    """Return the place of the first part that does not compile by itself, and the reason; None if all compile."""
    lines = grammar.text.split("\n")[1:]
    parts, place = {"": ['""']}, ""
    for line in lines:
        if line.startswith(PLACE):
            place = _place_of([line])
        elif place and (rule := _RULE.match(line)) is not None:
            parts.setdefault(place, []).append(rule[1])
    for place, names in itertools.islice(parts.items(), MAX_TRIED):
        try:
            guidance.checked(Grammar("lark", "\n".join([f"start: {' | '.join(names)}", *lines])))
        except guidance.GrammarError as error:
            return (place, _AT_LINE.sub(r"\2", str(error))) if place else None
    return None


def explained(message: str, schema: Mapping[str, Any]) -> str | None:
    """Explain a message of llguidance about a schema; return None if it is unknown."""

    def place(name: str, is_meant: Callable[[Any], bool]) -> str:
        return next((at for at, key, value in _keywords(schema) if key == name and is_meant(value)), f"#/…/{name}")

    if found := re.fullmatch(r"Unknown format: (.*)", message, re.DOTALL):
        shown = found[1]
        return (
            f"{place('format', lambda value: value == shown)} cannot be enforced: the format {shown} is not supported"
        )
    if message.startswith("oneOf constraints are not supported"):
        return f"{place('oneOf', bool)} cannot be enforced: its cases may overlap; use anyOf"
    if found := re.fullmatch(r"patternProperty regexes /(.*)/ and /(.*)/ are not disjoint", message, re.DOTALL):
        both = {found[1], found[2]}
        where = place("patternProperties", lambda v: isinstance(v, dict) and both <= v.keys())
        return f"{where} cannot be enforced: the patterns {found[1]} and {found[2]} may overlap"
    if message.startswith("min/maxProperties only supported"):
        where = next((at for at, key, _ in _keywords(schema) if key in ("minProperties", "maxProperties")), "#")
        return f"{where} cannot be enforced beside properties that are not required"
    if found := re.fullmatch(
        r"circular references with sibling keys are not supported: [^#]*(#.*)", message, re.DOTALL
    ):
        return f"the $ref to {found[1]}, which refers to itself, cannot be enforced beside other keywords"
    if message == "Schema intersection stack level exceeded":
        return f"{place('allOf', bool)} cannot be enforced: what it joins refers to itself, or is too deep"
    if message.startswith("lookarounds not supported"):
        return f"{place('pattern', _is_bad)} cannot be enforced: a regex may have no lookarounds or word boundaries"
    if message.startswith("regex parse error"):
        return f"{place('pattern', _is_bad)} cannot be enforced: {message}"
    if message == "Unsatisfiable schema: anyOf is empty":
        return f"{place('anyOf', lambda value: value == [])} is an empty list, which nothing satisfies"
    if message.startswith("Unsatisfiable schema: Regex is empty"):
        return "nothing satisfies this schema: no text has both its length and its format or pattern"
    if found := re.fullmatch(r"Unsatisfiable schema: (.*)", message, re.DOTALL):
        return f"nothing satisfies this schema: {found[1]}"
    return None


def _is_bad(pattern: str) -> bool:
    try:
        guidance.checked(Grammar("regex", pattern))
    except guidance.GrammarError:
        return True
    return False


def _keywords(schema: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield place, name and value of each keyword of a schema."""
    for at, each in subschemas(schema, "#"):
        for name, value in each.items() if isinstance(each, dict) else ():
            yield f"{at}/{name}", name, value
