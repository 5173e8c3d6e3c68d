"""Read the schema of a function's parameters, for forms of calls that write each parameter by itself."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

from pypto_serving.api.generation.json_schema import SchemaError
from pypto_serving.util import brief

Schema = Mapping[str, Any]
Place = tuple[str, str]
"""Where a definition is, and its name."""
MAX_VISITS = 256
"""Schemas that may say together which texts a parameter may be."""
_DEFINED = ("$defs", "definitions")
_UNREADABLE = ("anyOf", "oneOf", "allOf", "patternProperties", "minProperties", "maxProperties")
_ASSERTIONS = ("pattern", "minLength", "maxLength")
_WORDS = {"null": "null", "true": "boolean", "false": "boolean"}
_BOTH = {"anyOf", "oneOf", "allOf", "enum", "const", *_ASSERTIONS}


class Property(NamedTuple):
    """One parameter; `schema` has the definitions that it refers to."""

    name: str
    schema: Schema
    required: bool


class Text(NamedTuple):
    """Texts that a parameter may be: one of `values`, or any that the assertions hold for."""

    values: tuple[str, ...] | None = None
    pattern: str | None = None
    least: int = 0
    most: int | None = None

    @property
    def is_free(self) -> bool:
        """Return whether it may be any text."""
        return self == Text()


def is_any_object(schema: Schema) -> bool:
    """Tell whether a schema names no properties and forbids none."""
    named = "properties" in schema or schema.get("required") or "$ref" in schema
    return not named and schema.get("additionalProperties", True) in (True, {}) and not set(_UNREADABLE) & set(schema)


def as_object(schema: Schema) -> Schema:
    """Return the schema of those values of `schema` that are objects."""
    if {"anyOf", "oneOf", "allOf", "$ref"} & schema.keys():
        return {"allOf": [schema, {"type": "object"}]}
    return {**schema, "type": "object"}


def properties_of(schema: Schema) -> Iterator[Property]:
    """Yield the properties of an object. Raises SchemaError for what says more of them than each by itself."""
    whole = schema
    for _ in range(8):
        if not isinstance(whole.get("$ref"), str):
            break
        whole = {**_defined(whole["$ref"], schema), **{key: whole[key] for key in whole if key != "$ref"}}
    for word in (*_UNREADABLE, "$ref"):
        if word in whole:
            raise SchemaError(f"{word} of all parameters together is not supported in this model's form of calls")
    properties, required = whole.get("properties"), whole.get("required")
    found = dict(properties) if isinstance(properties, Mapping) else {}
    needed = {name: None for name in required if isinstance(name, str)} if isinstance(required, list) else {}
    if whole.get("additionalProperties", True) is not False:
        found |= {name: {} for name in needed if name not in found}
    if missing := [name for name in needed if found.get(name, False) is False]:
        raise SchemaError(f"{brief(missing[0])} is required, but no value is allowed for it")
    shared, known = {**schema, **whole}, dict[Place, list[Place]]()
    for name, one in found.items():
        if one is not False:
            own = with_definitions(one, shared, known) if isinstance(one, Mapping) else {}
            yield Property(name, own, name in needed)


def read_texts(schema: Any, root: Schema, visits: Iterator[int] | None = None) -> list[Text]:
    """Return the texts that a schema allows, [] for none. Raises SchemaError if its keywords are too entangled."""
    if not isinstance(schema, Mapping):
        return [Text()] if schema is not False else []
    kinds = schema.get("type")
    if kinds is not None and kinds != "string" and not (isinstance(kinds, list) and "string" in kinds):
        return []
    visits = _next_visit(visits)
    if isinstance(schema.get("$ref"), str):
        own = {key: value for key, value in schema.items() if key != "$ref"}
        return read_texts(_merged([_defined(schema["$ref"], root), own]), root, visits)
    branches = [word for word in ("anyOf", "oneOf", "allOf", "enum", "const") if word in schema]
    if not branches:
        return [Text(None, *_assertions(schema))]
    if len(_BOTH & schema.keys()) > 1:
        words = " beside ".join(sorted(_BOTH & schema.keys()))
        raise SchemaError(f"{words} for a text is not supported in this model's form of calls")
    value = schema[branches[0]]
    if branches[0] in ("enum", "const"):
        values = value if branches[0] == "enum" and isinstance(value, list) else [value]
        texts = tuple(each for each in values if isinstance(each, str))
        return [Text(texts)] if texts else []
    inner = value if isinstance(value, list) else []
    if branches[0] == "allOf":
        own = {key: each for key, each in schema.items() if key != "allOf"}
        return read_texts(_merged([own, *inner]), root, visits)
    return [text for one in inner for text in read_texts(one, root, visits)]


def _next_visit(visits: Iterator[int] | None) -> Iterator[int]:
    """Count the schemas that are looked at for one parameter: those that refer to each other may be without end."""
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
    for word in ("anyOf", "oneOf", "allOf"):
        inner = schema.get(word)
        branches = [set(read_words(one, root, visits)) for one in inner] if isinstance(inner, list) else []
        for branch in branches if word == "allOf" else []:
            found &= branch
        if branches and word != "allOf":
            found &= {each for branch in branches for each in branch}
    return [word for word in _WORDS if word in found]


def _assertions(schema: Schema) -> tuple[str | None, int, int | None]:
    pattern, least, most = (schema.get(word) for word in _ASSERTIONS)
    if not (isinstance(pattern, str | None) and isinstance(least, int | None) and isinstance(most, int | None)):
        raise SchemaError("pattern must be a text, minLength and maxLength must be whole numbers")
    return pattern, least or 0, most


def _merged(schemas: list[Any]) -> Schema:
    """Join schemas that must all hold. Raises SchemaError if they say different things of the same."""
    made: dict[str, Any] = {}
    for schema in schemas:
        for word, value in schema.items() if isinstance(schema, Mapping) else ():
            if word in made and made[word] != value and word in {"type", "$ref", *_BOTH}:
                raise SchemaError(f"{word} twice for a text is not supported in this model's form of calls")
            made[word] = value
    return made


def with_definitions(schema: Schema, root: Schema, known: dict[Place, list[Place]] | None = None) -> Schema:
    """Add the definitions of `root` that `schema` refers to, by whatever way.

    `known` are the references of definitions that were looked at before.
    """
    known = {} if known is None else known
    found: dict[str, dict[str, Any]] = {}
    todo = _references(schema)
    while todo:
        kind, name = place = todo.pop()
        shared = root.get(kind)
        if not isinstance(shared, Mapping) or name not in shared:
            raise SchemaError(f"$ref is {brief(f'#/{kind}/{name}')}, which is not defined")
        if name not in found.setdefault(kind, {}):
            found[kind][name] = shared[name]
            if place not in known:
                known[place] = _references(shared[name])
            todo += known[place]
    return {**schema, **found}


def _references(schema: Any) -> list[Place]:
    """List the definitions that a schema itself refers to."""
    found: list[Place] = []
    todo: list[Any] = [schema]
    while todo:
        one = todo.pop()
        if isinstance(one, list):
            todo += one
        elif isinstance(one, Mapping):
            todo += one.values()
            reference = one.get("$ref")
            if isinstance(reference, str) and reference.startswith("#"):
                found.append(_place(reference))
    return found


def _defined(reference: str, root: Schema) -> Schema:
    """Return the schema that `reference` names."""
    kind, name = _place(reference)
    found = root.get(kind)
    target = found.get(name) if isinstance(found, Mapping) else None
    if reference.count("/") > 2 or not isinstance(target, Mapping):
        raise SchemaError(f"$ref is {brief(reference)}, which is not supported in this model's form of calls")
    return target


def _place(reference: str) -> Place:
    parts = reference.split("/")
    if len(parts) < 3 or parts[0] != "#" or parts[1] not in _DEFINED:
        problem = "but may refer to $defs and definitions only in this model's form of calls"
        raise SchemaError(f"$ref is {brief(reference)}, {problem}")
    return parts[1], unquote(parts[2]).replace("~1", "/").replace("~0", "~")
