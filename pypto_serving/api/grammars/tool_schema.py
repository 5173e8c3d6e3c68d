"""Read the schema of a function's parameters, for forms of calls that write each parameter by itself."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

from pypto_serving.api.chat.tools import types_of
from pypto_serving.api.grammars.json_schema import SchemaError, prepare
from pypto_serving.api.grammars.references import DEFINITIONS, with_definitions
from pypto_serving.util import brief

Schema = Mapping[str, Any]
Place = tuple[str, str]
"""Where a definition is, and its name."""
MAX_VISITS = 256
"""Schemas that may say together which texts a parameter may be."""
MAX_COPIED = 1 << 18
"""Values in the definitions that go with parameters, counted for each."""
_UNREADABLE = ("anyOf", "oneOf", "allOf", "enum", "const", "patternProperties", "minProperties", "maxProperties")
_OF_OBJECTS = {"properties", "required", "additionalProperties"}
_ASSERTIONS = ("pattern", "minLength", "maxLength", "format")
_WORDS = {"null": "null", "true": "boolean", "false": "boolean"}
_BOTH = {"anyOf", "oneOf", "allOf", "enum", "const", *_ASSERTIONS}
_COUNTS_OF_CASES: Mapping[str, Callable[[int, int], bool]] = {
    "anyOf": lambda count, cases: count > 0,
    "oneOf": lambda count, cases: count == 1,
    "allOf": lambda count, cases: count == cases,
}
"""How many of its cases must hold."""


class Property(NamedTuple):
    """One parameter; `schema` has the definitions that it refers to."""

    name: str
    schema: Schema
    required: bool


class ParameterText(NamedTuple):
    """Texts that a parameter may be: one of `values`, or any that the assertions hold for."""

    values: tuple[str, ...] | None = None
    pattern: str | None = None
    least: int = 0
    most: int | None = None
    format: str | None = None

    @property
    def is_free(self) -> bool:
        """Return whether it may be any text."""
        return self == ParameterText()


def check_is_object(schema: Schema) -> None:
    """Raise SchemaError for a schema of something else."""
    if (kinds := types_of(schema, schema)) and "object" not in kinds:
        raise SchemaError(f"#/type is {kinds[0]}, but arguments are an object")


def is_any_object(schema: Schema) -> bool:
    """Tell whether a schema names no properties and forbids none. Raises SchemaError for what cannot be enforced."""
    said = prepare(schema, {})
    free = said.get("additionalProperties", True) in (True, {}) and not said.get("required")
    return free and said.keys() <= {"x-guidance", "type", "required", "additionalProperties"}


def as_object(schema: Schema) -> Schema:
    """Return the schema of those values of `schema` that are objects."""
    if {"anyOf", "oneOf", "allOf", "$ref"} & schema.keys():
        return {"allOf": [schema, {"type": "object"}]}
    return {**schema, "type": "object"}


def properties_of(schema: Schema) -> Iterator[Property]:
    """Yield the properties of an object; `is_any_object` has looked at the schema.

    Raises SchemaError for what says more of them than each by itself.
    """
    whole = schema = with_definitions(schema)
    for _ in range(8):
        if not isinstance(whole.get("$ref"), str):
            break
        beside = {key: whole[key] for key in whole if key != "$ref"}
        if lost := _OF_OBJECTS & beside.keys():
            raise SchemaError(f"{min(lost)} of all parameters beside $ref is not supported in this form of calls")
        whole = {**_defined(whole["$ref"], schema), **beside}
    for word in (*_UNREADABLE, "$ref"):
        if word in whole:
            raise SchemaError(f"{word} of all parameters together is not supported in this form of calls")
    found, needed = dict(whole.get("properties", {})), dict.fromkeys(whole.get("required", ()))
    others = whole.get("additionalProperties", True)
    if others in (True, {}):
        found |= {name: {} for name in needed if name not in found}
    if missing := [name for name in needed if found.get(name, False) is False]:
        raise SchemaError(f"{brief(missing[0])} is required, but properties allows no value for it")
    if not found and others not in (True, False, {}):
        raise SchemaError("additionalProperties of all parameters is not supported in this form of calls; name them")
    definitions = Definitions({**schema, **whole})
    for name, one in found.items():
        if one is not False:
            own = definitions.with_those_of(one) if isinstance(one, Mapping) else {}
            yield Property(name, own, name in needed)


def read_texts(schema: Any, root: Schema, visits: Iterator[int] | None = None) -> list[ParameterText]:
    """Return the texts that a schema allows, [] for none. Raises SchemaError if its keywords are too entangled."""
    if not isinstance(schema, Mapping):
        return [ParameterText()] if schema is not False else []
    kinds = schema.get("type")
    if kinds is not None and kinds != "string" and not (isinstance(kinds, list) and "string" in kinds):
        return []
    visits = _next_visit(visits)
    if isinstance(schema.get("$ref"), str):
        own = {key: value for key, value in schema.items() if key != "$ref"}
        return read_texts(_merged([_defined(schema["$ref"], root), own]), root, visits)
    branches = [word for word in ("anyOf", "oneOf", "allOf", "enum", "const") if word in schema]
    if not branches:
        return [_assertions(schema)]
    if len(_BOTH & schema.keys()) > 1:
        words = " beside ".join(sorted(_BOTH & schema.keys()))
        raise SchemaError(f"{words} for a text is not supported in this form of calls")
    value = schema[branches[0]]
    if branches[0] in ("enum", "const"):
        values = value if branches[0] == "enum" and isinstance(value, list) else [value]
        texts = tuple(each for each in values if isinstance(each, str))
        return [ParameterText(texts)] if texts else []
    inner = value if isinstance(value, list) else []
    if branches[0] == "allOf":
        own = {key: each for key, each in schema.items() if key != "allOf"}
        return read_texts(_merged([own, *inner]), root, visits)
    cases = [found for one in inner if (found := read_texts(one, root, visits))]
    if branches[0] == "oneOf" and len(cases) > 1 and not _are_apart(cases):
        raise SchemaError("oneOf with texts that may overlap is not supported in this form of calls; use anyOf")
    return [text for found in cases for text in found]


def _are_apart(cases: list[list[ParameterText]]) -> bool:
    """Tell whether texts are listed, and none of them in two cases."""
    values = [{value for text in texts for value in text.values or ()} for texts in cases]
    listed = all(text.values is not None for texts in cases for text in texts)
    return listed and len(set().union(*values)) == sum(map(len, values))


def _next_visit(visits: Iterator[int] | None) -> Iterator[int]:
    """Count the schemas read for one parameter, since schemas that refer to each other may never end."""
    visits = itertools.count() if visits is None else visits
    if next(visits) >= MAX_VISITS:
        raise SchemaError(f"a text has more than {MAX_VISITS} schemas that refer to each other; use fewer")
    return visits


def read_words(schema: Any, root: Schema, visits: Iterator[int] | None = None) -> list[str]:
    """Return which of null, true and false a schema allows, as JSON."""
    if not isinstance(schema, Mapping):
        return list(_WORDS) if schema is not False else []
    found, visits = set(_WORDS), _next_visit(visits)
    if isinstance(schema.get("$ref"), str):
        found &= set(read_words(_defined(schema["$ref"], root), root, visits))
    if (kinds := schema.get("type")) is not None:
        found &= {word for word, kind in _WORDS.items() if kind == kinds or (isinstance(kinds, list) and kind in kinds)}
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        found &= {json.dumps(value) for value in values if value is None or isinstance(value, bool)}
    for word, fits in _COUNTS_OF_CASES.items():
        inner = schema.get(word)
        cases = [read_words(one, root, visits) for one in inner] if isinstance(inner, list) else []
        found = {each for each in found if not cases or fits(sum(each in case for case in cases), len(cases))}
    return [word for word in _WORDS if word in found]


def _assertions(schema: Schema) -> ParameterText:
    pattern, least, most, form = (schema.get(word) for word in _ASSERTIONS)
    return ParameterText(None, pattern, int(least or 0), None if most is None else int(most), form)


def _merged(schemas: list[Any]) -> Schema:
    """Join schemas that must all hold. Raises SchemaError if they say different things of the same."""
    made: dict[str, Any] = {}
    for schema in schemas:
        for word, value in schema.items() if isinstance(schema, Mapping) else ():
            if word in made and made[word] != value and word in {"type", "$ref", *_BOTH}:
                raise SchemaError(f"{word} twice for a text is not supported in this form of calls")
            made[word] = value
    return made


class Definitions:
    """Owns an index of the definitions of `root`, and how much may still be copied."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._known: dict[Place, tuple[list[Place], int]] = {}
        self._left = MAX_COPIED

    def with_those_of(self, schema: Schema) -> Schema:
        """Add the definitions that `schema` refers to, by whatever way. Raises SchemaError beyond MAX_COPIED."""
        found: dict[str, dict[str, Any]] = {}
        todo, _ = _references(schema)
        while todo:
            kind, name = place = todo.pop()
            if name in found.setdefault(kind, {}):
                continue
            shared = self._root.get(kind)
            if not isinstance(shared, Mapping) or name not in shared:
                raise SchemaError(f"$ref is {brief(f'#/{kind}/{name}')}, which is not defined")
            found[kind][name] = shared[name]
            if place not in self._known:
                self._known[place] = _references(shared[name])
            more, num_values = self._known[place]
            todo += more
            self._left -= num_values
            if self._left < 0:
                problem = f"the definitions that each parameter refers to have more than {MAX_COPIED} values in all"
                raise SchemaError(f"{problem}; refer to fewer or smaller ones")
        return {**schema, **found}


def _references(schema: Any) -> tuple[list[Place], int]:
    """List the definitions that a schema itself refers to, and count its values."""
    found: list[Place] = []
    todo, num_values = [schema], 0
    while todo:
        one = todo.pop()
        num_values += 1
        if isinstance(one, list):
            todo += one
        elif isinstance(one, Mapping):
            todo += one.values()
            reference = one.get("$ref")
            if isinstance(reference, str) and reference.startswith("#"):
                found.append(_place(reference))
    return found, num_values


def _defined(reference: str, root: Schema) -> Schema:
    """Return the schema that `reference` names."""
    kind, name = _place(reference)
    found = root.get(kind)
    target = found.get(name) if isinstance(found, Mapping) else None
    if reference.count("/") > 2 or not isinstance(target, Mapping):
        raise SchemaError(f"$ref is {brief(reference)}, which is not supported in this form of calls")
    return target


def _place(reference: str) -> Place:
    parts = reference.split("/")
    if len(parts) < 3 or parts[0] != "#" or parts[1] not in DEFINITIONS:
        problem = "but may refer to $defs and definitions only in this form of calls"
        raise SchemaError(f"$ref is {brief(reference)}, {problem}")
    return parts[1], unquote(parts[2]).replace("~1", "/").replace("~0", "~")
