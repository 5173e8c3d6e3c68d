"""What the values of JSON Schema's keywords must be."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from pypto_serving.api.grammars.numbers import BOUNDS, is_number

COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
MAPS = frozenset({"properties", "patternProperties"})
_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})


def _is_count(value: Any) -> bool:
    return is_number(value) and value >= 0 and math.isfinite(value) and value == int(value)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_type(value: Any) -> bool:
    names = [value] if isinstance(value, str) else value
    return _is_texts(names) and bool(names) and _TYPES.issuperset(names)


_Shape = tuple[str, Callable[[Any], bool]]
_OBJECT: _Shape = ("an object", lambda value: isinstance(value, Mapping))
_LIST: _Shape = ("a list", lambda value: isinstance(value, list))
_TEXT: _Shape = ("a text", lambda value: isinstance(value, str))
_BOUND: _Shape = ("a number", lambda value: is_number(value) or isinstance(value, bool))
SHAPES: Mapping[str, _Shape] = {
    "type": (f"one or more of {', '.join(sorted(_TYPES))}", _is_type),
    "pattern": _TEXT,
    "format": _TEXT,
    "required": ("a list of texts", _is_texts),
    "enum": ("a list that is not empty", lambda value: isinstance(value, list) and bool(value)),
    "const": ("any value", lambda value: True),
    "multipleOf": ("a number above 0", lambda value: is_number(value) and value > 0),
    **dict.fromkeys(COUNTS, ("a whole number of at least 0", _is_count)),
    **dict.fromkeys(BOUNDS, _BOUND),
    **dict.fromkeys(LISTS, _LIST),
    **dict.fromkeys(MAPS, _OBJECT),
}
"""What the value of a keyword must be. The bounds of draft 4 may be true or false."""
