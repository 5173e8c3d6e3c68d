"""JSON schemas for /openapi.json of fields that are read as they are, or whose bounds are checked elsewhere.

The bounds are those of the checks; a test holds both together. What depends on the model, on options or on other fields
is not described.
"""

from __future__ import annotations

from typing import Any

from pydantic import WithJsonSchema

from pypto_serving.types.sampling import INT32_MAX

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
MAY_TEXT: Schema = {"type": ["string", "null"]}
OBJECT: Schema = {"type": "object"}
FLAG: Schema = {"type": ["boolean", "null"]}


def or_null(*schemas: Schema) -> WithJsonSchema:
    """Describe a field that has one of `schemas`, or null."""
    return WithJsonSchema({"anyOf": [*schemas, {"type": "null"}]})


def whole(low: int, high: int = INT32_MAX) -> WithJsonSchema:
    """Describe a whole number from `low` to `high`, or null."""
    return or_null({"type": "integer", "minimum": low, "maximum": high})


def number(low: float, high: float) -> WithJsonSchema:
    """Describe a number from `low` to `high`, or null."""
    return or_null({"type": "number", "minimum": low, "maximum": high})


def text(min_chars: int, max_chars: int) -> WithJsonSchema:
    """Describe a text of `min_chars` to `max_chars` characters, or null."""
    return or_null({"type": "string", "minLength": min_chars, "maxLength": max_chars})


def list_of(items: Schema, min_items: int = 0, max_items: int | None = None) -> Schema:
    """Describe a list."""
    schema = {"type": "array", "items": items, "minItems": min_items, "maxItems": max_items}
    return {name: value for name, value in schema.items() if value}


def object_of(required: Schema, **optional: Schema) -> Schema:
    """Describe an object by its properties."""
    return {"type": "object", "properties": required | optional, "required": list(required)}


def typed(kind: str, required: Schema | None = None, **optional: Schema) -> Schema:
    """Describe an object with a `type`."""
    return object_of({"type": {"const": kind}, **(required or {})}, **optional)


ABOVE_0_TO_1 = or_null({"type": "number", "exclusiveMinimum": 0, "maximum": 1})
