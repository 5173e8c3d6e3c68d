"""Write a `oneOf` as `anyOf` where no two of its cases can hold at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pypto_serving.api.chat.tools import MAX_HOPS

MAX_CASES, MAX_VALUES = 64, 64
MAX_COMPARISONS = 8192
"""Of cases, in a schema."""
_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})


class OneOf:
    """Finds out for one prepared schema which cases exclude each other; `find` returns what a reference leads to."""

    def __init__(self, find: Callable[[str], Any]) -> None:
        self._find = find
        self._left = MAX_COMPARISONS
        self._read: dict[int, _Case] = {}

    def settle(self, schema: dict[str, Any]) -> None:
        """Write the `oneOf` of a part as `anyOf`, if no two of its cases can hold at once.

        Raises ValueError if that takes too long to find out.
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
        """Return cases of `anyOf` that say the same as these of `oneOf`; None if they may overlap."""
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
        """Return what a reference leads to, other schemas as they are, and True where that is not clear."""
        for _ in range(MAX_HOPS):
            if not isinstance(schema, Mapping) or "$ref" not in schema:
                return schema
            schema = self._find(schema["$ref"])
        return True

    def _apart(self, one: Any, other: Any) -> bool:
        """Whether no value is valid under both, by its type, its value, or a property that one of them requires."""
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

    def _property(self, schema: Mapping[str, Any], name: str) -> Any:
        """Return what the value of a property must be; True for anything."""
        if name in schema.get("properties", ()):
            return self._resolved(schema["properties"][name])
        return "patternProperties" in schema or schema.get("additionalProperties", True) is not False

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
        case {"required": [str(name)], **rest} if rest in ({}, {"type": "object"}):
            return name
    return None


def _with_one_of(name: str | None, names: Sequence[str | None]) -> dict[str, Any]:
    """Write objects that have one of some properties, and none of the others."""
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
