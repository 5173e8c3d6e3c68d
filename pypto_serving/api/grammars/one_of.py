"""Replace a `oneOf` by `anyOf` if no two of its cases can hold at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pypto_serving.api.chat.tools import MAX_HOPS

MAX_CASES, MAX_VALUES = 64, 64
MAX_COMPARISONS = 8192
"""Limit of comparisons of two cases, in one schema."""
_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})


class OneOf:
    """Finds mutually exclusive cases in one prepared schema. `find` returns the schema that a reference points to."""

    def __init__(self, find: Callable[[str], Any]) -> None:
        self._find = find
        self._left = MAX_COMPARISONS
        self._read: dict[int, _Case] = {}

    def settle(self, schema: dict[str, Any]) -> None:
        """Replace the `oneOf` of a part by `anyOf`, if no two of its cases can hold at once.

        Raises ValueError if the check takes too long.
        """
        found = self._as_any_of(schema["oneOf"]) if "oneOf" in schema else None
        if found is None:
            return
        del schema["oneOf"]
        if "anyOf" in schema:
            schema["allOf"] = [*schema.get("allOf", ()), {"anyOf": found}]
        else:
            schema["anyOf"] = found

    def _as_any_of(self, cases: Sequence[Any]) -> Sequence[Any] | None:
        """Return cases for `anyOf` that are equivalent to these cases of `oneOf`; None if these may overlap."""
        whole = list(map(self._resolved, cases))
        listed = [self._case(case).values if isinstance(case, Mapping) else None for case in whole]
        if None not in listed:
            values = [value for each in listed for value in each or ()]
            return cases if len(set(values)) == len(values) else None
        if len(cases) > MAX_CASES:
            problem = f"it has {len(cases)} cases, but may have {MAX_CASES} if they do not all list their values"
            raise ValueError(f"{problem}; use anyOf")
        names = [_only_required(case) for case in cases]
        if len(set(names)) == len(cases) and None not in names:
            return [_with_one_of(name, names) for name in names]
        return cases if all(itertools.starmap(self._apart, itertools.combinations(whole, 2))) else None

    def _resolved(self, schema: Any) -> Any:
        """Follow references to a schema; return True after too many."""
        for _ in range(MAX_HOPS):
            if not isinstance(schema, Mapping) or "$ref" not in schema:
                return schema
            schema = self._find(schema["$ref"])
        return True

    def _apart(self, one: Any, other: Any) -> bool:
        """Return whether types, values or a required property ensure that no value is valid under both schemas."""
        if self._unlike(one, other):
            return True
        if not isinstance(one, Mapping) or not isinstance(other, Mapping):
            return False
        case, another = self._case(one), self._case(other)
        if case.types & another.types != {"object"}:
            return False
        names = [*case.required, *another.required]
        return any(self._unlike(self._property(one, name), self._property(other, name)) for name in names)

    def _unlike(self, one: Any, other: Any) -> bool:
        """Return whether two schemas have no type in common or, if both list their values, no value."""
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

    def _property(self, schema: Mapping[str, Any], name: str) -> Any:
        """Return the schema of a property; True if any value is allowed."""
        if name in schema.get("properties", ()):
            return self._resolved(schema["properties"][name])
        return "patternProperties" in schema or schema.get("additionalProperties", True) is not False

    def _case(self, schema: Mapping[str, Any]) -> _Case:
        """Return the case that a schema describes. Each schema is read only once, but compared with many."""
        if id(schema) not in self._read:
            self._read[id(schema)] = _read_case(schema)
        return self._read[id(schema)]


class _Case(NamedTuple):
    """Facts about the values that a schema allows.

    - `types`: their types; integers count as numbers
    - `values`: the values with their types, if they are listed; all arrays count as equal, and all objects
    - `required`: the required properties
    """

    types: frozenset[str]
    values: frozenset[tuple[str, Any]] | None
    required: list[str]


def _only_required(case: Any) -> str | None:
    """Return the property that a case requires, if that is its only assertion."""
    match case:
        case {"required": [str(name)], **rest} if rest in ({}, {"type": "object"}):
            return name
    return None


def _with_one_of(name: str | None, names: Sequence[str | None]) -> dict[str, Any]:
    """Return the schema of objects that have the property `name`, but no other one of `names`."""
    others = {str(other): False for other in names if other != name}
    return {"type": "object", "properties": others, "required": [name], "additionalProperties": True}


def _read_case(schema: Mapping[str, Any]) -> _Case:
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    values = None
    if listed is not None and len(listed) <= MAX_VALUES:
        values = frozenset((_type_of(value), None if isinstance(value, list | Mapping) else value) for value in listed)
    kinds = schema.get("type", _TYPES if values is None else [kind for kind, _ in values])
    given = {kinds} if isinstance(kinds, str) else {*kinds}
    types = frozenset("number" if kind == "integer" else kind for kind in given)
    return _Case(types, values, schema.get("required", [])[:MAX_CASES])


def _type_of(value: Any) -> str:
    for kind, python in (("boolean", bool), ("number", (int, float)), ("string", str), ("array", list)):
        if isinstance(value, python):
            return kind
    return "null" if value is None else "object"
