"""Tell that no two cases of a `oneOf` hold at once, so that it says the same as `anyOf`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

MAX_CASES, MAX_VALUES = 64, 64
MAX_COMPARISONS = 8192
"""Of cases, in a schema."""
_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
Resolve = Callable[[Any], Any]
"""Returns what a schema that is only a reference refers to; others as they are."""


class OneOf:
    """Finds out for one schema which cases exclude each other."""

    def __init__(self) -> None:
        self._left = MAX_COMPARISONS
        self._read: dict[int, _Case] = {}

    def as_any_of(self, cases: Sequence[Any], resolve: Resolve) -> list[Any] | None:
        """Return cases of `anyOf` that say the same as these of `oneOf`; None if they may overlap.

        Raises ValueError if that takes too long to find out.
        """
        whole = [resolve(case) for case in cases]
        listed = [self._case(case).values if isinstance(case, Mapping) else None for case in whole]
        if None not in listed:
            values = [value for each in listed for value in each or ()]
            return list(cases) if len(set(values)) == len(values) else None
        if len(cases) > MAX_CASES:
            problem = f"it has {len(cases)} cases, but may have {MAX_CASES} if they do not all list their values"
            raise ValueError(f"{problem}; use anyOf")
        names = [_only_required(case) for case in cases]
        if len(set(names)) == len(cases) and None not in names:
            return [_with_one_of(name, names) for name in names]
        if all(self._apart(one, other, resolve) for one, other in itertools.combinations(whole, 2)):
            return list(cases)
        return None

    def _apart(self, one: Any, other: Any, resolve: Resolve) -> bool:
        """Whether no value is valid under both, by its type, its value, or a property that one of them requires."""
        if self._unlike(one, other):
            return True
        if not isinstance(one, Mapping) or not isinstance(other, Mapping):
            return False
        case, another = self._case(one), self._case(other)
        if case.types & another.types != {"object"}:
            return False
        names = [*case.required, *another.required]
        return any(self._unlike(_property(one, name, resolve), _property(other, name, resolve)) for name in names)

    def _unlike(self, one: Any, other: Any) -> bool:
        """Whether no value has the type of both, or is among those of both."""
        self._left -= 1
        if self._left < 0:
            problem = f"the cases of all oneOf take more than {MAX_COMPARISONS} comparisons"
            raise ValueError(f"{problem}; use anyOf, or give each case a const of its own that it requires first")
        if one is False or other is False:
            return True
        if not isinstance(one, Mapping) or not isinstance(other, Mapping):
            return False
        case, another = self._case(one), self._case(other)
        if case.values is not None and another.values is not None:
            return case.values.isdisjoint(another.values)
        return case.types.isdisjoint(another.types)

    def _case(self, schema: Mapping[str, Any]) -> _Case:
        """Return what a schema says of its values; it is read once, since a schema is compared with many."""
        if id(schema) not in self._read:
            self._read[id(schema)] = _read_case(schema)
        return self._read[id(schema)]


class _Case(NamedTuple):
    """What a schema says of its values.

    - `types`: those that they may have; integers are numbers
    - `values`: the values with their types, if they are listed; all arrays are one, and all objects
    - `required`: the properties that it requires
    """

    types: frozenset[str]
    values: frozenset[tuple[str, Any]] | None
    required: list[str]


def _only_required(case: Any) -> str | None:
    """Return the property that a case requires if it says nothing else."""
    match case:
        case {"required": [str(name)], **rest} if not rest.keys() - {"title", "description", "type"}:
            return name if rest.get("type", "object") == "object" else None
    return None


def _with_one_of(name: str | None, names: Sequence[str | None]) -> dict[str, Any]:
    """Write objects that have one of some properties, and none of the others."""
    others = {str(other): False for other in names if other != name}
    return {"type": "object", "properties": others, "required": [name], "additionalProperties": True}


def _read_case(schema: Mapping[str, Any]) -> _Case:
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    values = None
    if isinstance(listed, list) and len(listed) <= MAX_VALUES:
        values = frozenset((_type_of(value), None if isinstance(value, list | Mapping) else value) for value in listed)
    kinds = schema.get("type")
    given = [kinds] if isinstance(kinds, str) else kinds
    types = _TYPES if values is None else frozenset(kind for kind, _ in values)
    if isinstance(given, list):
        types = frozenset("number" if kind == "integer" else str(kind) for kind in given)
    names = schema.get("required")
    required = [name for name in names[:MAX_CASES] if isinstance(name, str)] if isinstance(names, list) else []
    return _Case(types, values, required)


def _type_of(value: Any) -> str:
    for kind, python in (("boolean", bool), ("number", (int, float)), ("string", str), ("array", list)):
        if isinstance(value, python):
            return kind
    return "null" if value is None else "object"


def _property(schema: Mapping[str, Any], name: str, resolve: Resolve) -> Any:
    """Return what the value of a property must be; True for anything."""
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return resolve(properties[name])
    if "patternProperties" in schema:
        return True
    return schema.get("additionalProperties", True) is not False
