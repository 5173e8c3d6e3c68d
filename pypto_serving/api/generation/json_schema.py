"""Prepare JSON schemas for llguidance: refuse what it cannot honour, and bound white space."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pypto_serving.util import brief

WHITESPACE = r"\x20|\r?\n[\x20\x09]{0,20}"
"""White space between the parts of JSON: one space, or a line break and its indentation."""

_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "not": (),
    "if": (),
    "contains": (),
    "uniqueItems": (False,),
    "propertyNames": (True, {}),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "$dynamicRef": (),
    "$recursiveRef": (),
    "x-guidance": (),
}
"""Keywords that cannot be enforced, with the values that change nothing. Annotations and unknown ones are ignored."""

_SCHEMAS = frozenset({"additionalItems", "additionalProperties", "items"})
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_NUMBERS = frozenset({"const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_EXACT = 2**53
"""Whole numbers beyond this are not exact in llguidance."""


class SchemaError(Exception):
    """A keyword that cannot be honoured; the message names it and its place."""


def prepare(
    schema: Mapping[str, Any], options: Mapping[str, Any], close_objects: bool = False, keep_free: bool = False
) -> dict[str, Any]:
    """Return a schema that llguidance enforces as it stands, in its own order, with `options` for llguidance.

    With `close_objects`, objects have no properties but those they name; with `keep_free`, objects that name none may
    have any. Raises SchemaError.
    """
    return {"x-guidance": dict(options), **_Copier(close_objects, keep_free).copy(schema, "#")}


class _Copier:
    def __init__(self, close_objects: bool, keep_free: bool) -> None:
        self._close_objects = close_objects
        self._keep_free = keep_free

    def copy(self, schema: Any, place: str) -> Any:
        """Return a checked copy of the schema at `place`."""
        if not isinstance(schema, Mapping):
            return schema
        made = {}
        for name, value in schema.items():
            where = f"{place}/{name}"
            if name in _UNSUPPORTED:
                if any(value == neutral and type(value) is type(neutral) for neutral in _UNSUPPORTED[name]):
                    continue
                raise SchemaError(f"{where} cannot be enforced: the keyword {name} is not supported")
            if name == "$ref" and not str(value).startswith("#"):
                raise SchemaError(f"{where} cannot be enforced: {brief(value)} is not in this schema")
            if name in _NUMBERS:
                _check_numbers(value, where)
            if name in _MAPS and isinstance(value, Mapping):
                value = {key: self.copy(each, f"{where}/{key}") for key, each in value.items()}
            elif name in _LISTS and isinstance(value, list):
                value = [self.copy(each, f"{where}/{i}") for i, each in enumerate(value)]
            elif name in _SCHEMAS:
                value = self.copy(value, where)
            made[name] = value
        _check_count(made, place)
        if self._close_objects and _is_open_object(made) and ("properties" in made or not self._keep_free):
            made["additionalProperties"] = False
        return made


def _is_open_object(schema: Mapping[str, Any]) -> bool:
    kinds = {"additionalProperties", "patternProperties"}
    return (schema.get("type") == "object" or "properties" in schema) and kinds.isdisjoint(schema)


def _check_count(schema: Mapping[str, Any], place: str) -> None:
    """Refuse a minimum that repeated keys could seem to reach: only keys with a name of their own are unique."""
    least, required = schema.get("minProperties", 0), schema.get("required", ())
    if isinstance(least, int) and isinstance(required, list | tuple) and least > len(set(map(str, required))) + 1:
        message = f"{place}/minProperties cannot be enforced: {least} is more than one above the required properties"
        raise SchemaError(message)


def _check_numbers(value: Any, where: str) -> None:
    """Refuse whole numbers that are not exact as floats."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            _check_numbers(each, where)
    elif isinstance(value, int) and abs(value) > _EXACT:
        raise SchemaError(f"{where} cannot be enforced: {brief(value)} is beyond 2**53")
