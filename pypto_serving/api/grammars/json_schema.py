"""Prepare JSON schemas for llguidance: refuse keywords that it cannot enforce, and limit white space."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from pypto_serving.api.grammars.ecma import to_rust
from pypto_serving.api.grammars.numbers import BOUNDS, inward, is_exact, is_number, settle_bounds, unjoined_multiple
from pypto_serving.api.grammars.one_of import OneOf
from pypto_serving.util import brief

WHITESPACE = r"\x20|\r?\n[\x20\x09]{0,20}"
"""Allowed white space between the parts of JSON: one space, or a line break and indentation."""
ESCAPES = 'nrbtf\\"'
"""Allowed escapes in strings. Without `u`, a text has only one spelling, so keys that look different are different."""

DEFINITIONS = "#/$defs/"
"""Beginning of references in a prepared schema, except references to the whole schema."""

_SCHEMAS = frozenset({"additionalProperties", "items"})
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_MAPS = frozenset({"properties", "patternProperties"})
"""Keywords whose values are a schema, a list of schemas, and an object of schemas by name."""
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_NUMBERS = frozenset({"const", "enum", "multipleOf", *BOUNDS})
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
"""Keywords that cannot be enforced, with values that have no effect. Annotations and unknown keywords are dropped."""

MAX_COPIED = 1 << 18
"""Limit of keywords copied by following references."""
_UNWRITABLE = re.compile("[\\x00-\\x07\\x0b\\x0e-\\x1f\\x7f\\ud800-\\udfff]")
"""Characters that can only be written with `\\u` in JSON: some control characters, and lone surrogates."""

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = f"(?:{_YEAR}-(?:0[13-9]|1[0-2])-[0-9]{{2}}|{_YEAR}-02-(?:[01][0-9]|2[0-8])|{_LEAP_YEAR}-02-29)"
_TIME = "[0-9]{2}:[0-9]{2}:[0-5]"
_LABEL = "(?:[^.]{1,2}|[^.]{2}(?:[^.-][^.]*|-(?:[^.-][^.]*)?))"
_HOST_CHARS = 253
_NARROWER: Mapping[str, str] = {
    "date": f"^{_DAY}$",
    "date-time": f"^{_DAY}[Tt]{_TIME}",
    "time": f"^{_TIME}",
    "hostname": rf"^{_LABEL}(?:\.{_LABEL})*$",
}
"""Patterns that strings of a format must also match, since llguidance's own definition of the format allows more.

February 29 only in leap years; no year 0, no leap second; no label with `--` at its third character, as in Punycode.
"""


class SchemaError(Exception):
    """A schema that cannot be enforced; the message names the keyword and its place."""


def prepare(
    schema: Mapping[str, Any], options: Mapping[str, Any], close_objects: bool = False, keep_free: bool = False
) -> dict[str, Any]:
    """Return a schema that llguidance enforces completely, with its `options`. Properties keep their order.

    With `close_objects`, objects may have only the properties that they name; but with `keep_free`, objects that name
    none may have any. Raises SchemaError.
    """
    copier = _SchemaCopier(schema, is_split=False)
    made = copier.whole()
    if copier.definitions:
        made["$defs"] = copier.definitions
    if close_objects:
        close_all(made, keep_free)
    return with_options(made, options)


def prepare_parts(schema: Mapping[str, Any]) -> tuple[dict[str, Any], Definitions]:
    """Return a prepared schema without options, and separately the definitions that it refers to.

    Each part of the schema can be used alone, since references to the whole schema also become definitions.
    """
    copier = _SchemaCopier(schema, is_split=True)
    return copier.whole(), Definitions(copier.definitions)


def close_all(schema: Mapping[str, Any], keep_free: bool) -> None:
    """Allow objects of a prepared schema only the properties that they name. `keep_free`: not if they name none."""
    for _, part in subschemas(schema, ""):
        if isinstance(part, dict) and _is_open_object(part) and ("properties" in part or not keep_free):
            part["additionalProperties"] = False


def with_options(schema: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Add llguidance's `options` to a schema."""
    return {"x-guidance": {**options, "json_allowed_escapes": ESCAPES}, **schema}


def subschemas(schema: Any, at: str) -> Iterator[tuple[str, Any]]:
    """Yield a prepared schema and all schemas in it, each after its place."""
    yield at, schema
    for name, value in schema.items() if isinstance(schema, Mapping) else ():
        if name in _SCHEMAS:
            yield from subschemas(value, f"{at}/{name}")
        elif name in _MAPS | {"$defs"} and isinstance(value, Mapping):
            for key, each in value.items():
                yield from subschemas(each, f"{at}/{name}/{key}")
        elif name in _LISTS and isinstance(value, list):
            for i, each in enumerate(value):
                yield from subschemas(each, f"{at}/{name}/{i}")


class Definitions:
    """Owns the prepared schemas that parts of a schema refer to, and the number that may still be copied."""

    def __init__(self, schemas: Mapping[str, Any]) -> None:
        self._schemas = schemas
        self._known: dict[str, tuple[list[str], int]] = {}
        self._left = MAX_COPIED

    def target(self, schema: Mapping[str, Any]) -> Any:
        """Return the schema that a prepared schema refers to, or None."""
        return self._schemas.get(str(schema.get("$ref")).removeprefix(DEFINITIONS))

    def with_those_of(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add all definitions that a schema refers to, directly or indirectly. Raises SchemaError beyond MAX_COPIED."""
        found: dict[str, Any] = {}
        todo, _ = _references(schema)
        while todo:
            name = todo.pop()
            if name in found or name not in self._schemas:
                continue
            found[name] = self._schemas[name]
            if name not in self._known:
                self._known[name] = _references(found[name])
            more, num_values = self._known[name]
            todo += more
            self._left -= num_values
            if self._left < 0:
                problem = f"the definitions that each parameter refers to have more than {MAX_COPIED} values in all"
                raise SchemaError(f"{problem}; refer to fewer or smaller ones")
        return {**schema, "$defs": found} if found else schema


def _references(schema: Any) -> tuple[list[str], int]:
    """Return the names that a prepared schema refers to directly, and how many schemas it contains."""
    parts = [part for _, part in subschemas(schema, "")]
    refs = [part["$ref"] for part in parts if isinstance(part, Mapping) and "$ref" in part]
    return [ref.removeprefix(DEFINITIONS) for ref in refs], len(parts)


class _SchemaCopier:
    """Copies the assertions of a schema, and each definition that it refers to once.

    `root` is the whole schema. With `is_split`, references to it also become a definition. The base of a place is the
    subschema against which references there are resolved.
    """

    def __init__(self, root: Mapping[str, Any], is_split: bool) -> None:
        self._root = root
        self._is_split = is_split
        self.definitions: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        self._found: dict[tuple[str, int], tuple[Any, str, Mapping[str, Any]]] = {}
        self._left = MAX_COPIED

    def whole(self) -> dict[str, Any]:
        """Return a copy of the whole schema."""
        made: dict[str, Any] = self.copy(self._root, "#", self._root)
        parts = [*subschemas(made, "#"), *subschemas({"$defs": self.definitions}, "#")]
        schemas = [(place, part) for place, part in parts if isinstance(part, dict)]
        if (found := unjoined_multiple(schemas)) is not None:
            where = f"{found[0]}/multipleOf"
            raise SchemaError(f"{where} cannot be enforced: {found[1]} and another one are too large together")
        settle_bounds(schemas)
        one_of = OneOf(lambda ref: made if ref == "#" else self.definitions[ref.removeprefix(DEFINITIONS)])
        for place, part in schemas:
            try:
                one_of.settle(part)
            except ValueError as error:
                raise SchemaError(f"{place}/oneOf cannot be enforced: {error}") from None
        return made

    def copy(self, schema: Any, place: str, base: Mapping[str, Any]) -> Any:
        """Return a checked copy of the schema at `place`."""
        if not isinstance(schema, Mapping):
            if isinstance(schema, bool):
                return schema
            raise SchemaError(f"{place} is {brief(schema)}, but must be a schema")
        if schema is not self._root and _is_base(schema):
            base = schema
        self._left -= len(schema) if self._names else 0
        if self._left < 0:
            raise SchemaError(f"its references lead to more than {MAX_COPIED} values; refer to fewer or smaller ones")
        made: dict[str, Any] = {}
        for name, value in _normal(schema).items():
            where = f"{place}/{name}"
            if name in _UNSUPPORTED:
                if any(value == neutral and type(value) is type(neutral) for neutral in _UNSUPPORTED[name]):
                    continue
                raise SchemaError(f"{where} cannot be enforced: the keyword {name} is not supported")
            if name == "$ref":
                made[name] = self._refer(str(value), where, base)
            elif name in _MAPS and isinstance(value, Mapping):
                names = value if name == "properties" else _patterns(value, where)
                copies = [self.copy(each, f"{where}/{key}", base) for key, each in value.items()]
                made[name] = dict(zip(names, copies, strict=True))
            elif name in _LISTS and isinstance(value, list):
                made[name] = [self.copy(each, f"{where}/{i}", base) for i, each in enumerate(value)]
            elif name in _SCHEMAS:
                made[name] = self.copy(value, where, base)
            elif name in _SHAPES:
                made[name] = _checked(name, value, where)
        _check_count(made, place)
        _narrow(made)
        return made

    def _look_up(self, ref: str, where: str, base: Mapping[str, Any]) -> tuple[Any, str, Mapping[str, Any]]:
        """Return the schema that `ref` refers to, the last part of its path, and its base."""
        root_id = self._root.get("$id", self._root.get("id"))
        if isinstance(root_id, str) and ref.startswith(f"{root_id.removesuffix('#')}#"):
            ref, base = ref[len(root_id.removesuffix("#")) :], self._root
        if not re.match("#(/|$)", ref):
            raise SchemaError(f"{where} cannot be enforced: {brief(ref)} is not in this schema")
        target: Any = base
        last = ""
        for part in unquote(ref).split("/")[1:]:
            last = part.replace("~1", "/").replace("~0", "~")
            target = _child(target, last)
            if target is None:
                raise SchemaError(f"{where} cannot be enforced: {brief(ref)} is not in this schema")
            if isinstance(target, Mapping) and _is_base(target):
                base = target
        return target, last, base

    def _refer(self, ref: str, where: str, base: Mapping[str, Any]) -> str:
        """Copy the schema that `ref` refers to, unless done before; return a reference to the copy."""
        if (ref, id(base)) not in self._found:
            self._found[ref, id(base)] = self._look_up(ref, where, base)
        target, last, base = self._found[ref, id(base)]
        if target is self._root and not self._is_split:
            return "#"
        if id(target) not in self._names:
            name = re.sub(r"[^A-Za-z0-9_.-]", "_", last) or "root"
            while name in self.definitions:
                name += "_"
            self._names[id(target)] = name
            self.definitions[name] = True
            self.definitions[name] = self.copy(target, ref, base)
        return DEFINITIONS + self._names[id(target)]


def _child(node: Any, part: str) -> Any:
    """Return the child of a node under one part of a JSON pointer, or None."""
    if isinstance(node, Mapping):
        return node.get(part)
    if isinstance(node, list) and part.isascii() and part.isdigit() and len(part) < 10 and int(part) < len(node):
        return node[int(part)]
    return None


def _is_base(schema: Mapping[str, Any]) -> bool:
    """Return whether references in a schema are relative to that schema."""
    name = schema.get("$id")
    return isinstance(name, str) and not name.startswith("#")


def _normal(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema in which `items` of older drafts are written as in draft 2020-12."""
    made = {name: value for name, value in schema.items() if name != "additionalItems"}
    if isinstance(schema.get("items"), list):
        made["prefixItems"] = made.pop("items")
        if "additionalItems" in schema:
            made["items"] = schema["additionalItems"]
    return made


def _pattern(value: str, where: str) -> str:
    try:
        return to_rust(value)
    except ValueError as error:
        raise SchemaError(f"{where} cannot be enforced: {brief(value)} is {error}") from None


def _patterns(given: Mapping[str, Any], where: str) -> list[str]:
    """Return the patterns of properties. Raises SchemaError if two are equal after translation."""
    made = [_pattern(each, where) for each in given]
    if len(set(made)) < len(made):
        raise SchemaError(f"{where} cannot be enforced: two of the patterns are the same")
    return made


def _is_open_object(schema: Mapping[str, Any]) -> bool:
    kinds = {"additionalProperties", "patternProperties"}
    return (schema.get("type") == "object" or "properties" in schema) and kinds.isdisjoint(schema)


def _check_count(schema: Mapping[str, Any], place: str) -> None:
    """Refuse a `minProperties` above what required keys ensure: llguidance also counts repeated keys."""
    least, required = schema.get("minProperties", 0), schema.get("required", ())
    if least > len(set(required)) + 1:
        problem = f"{least} is more than one above the required properties"
        raise SchemaError(f"{place}/minProperties cannot be enforced: {problem}")


def _checked(name: str, value: Any, where: str) -> Any:
    """Check the value of an assertion, and return it in a form that llguidance reads correctly."""
    wanted, is_right = _SHAPES[name]
    if not is_right(value):
        raise SchemaError(f"{where} is {brief(value)}, but must be {wanted}")
    if name == "pattern":
        return _pattern(value, where)
    if name in _COUNTS and isinstance(value, float) and value.is_integer():
        return int(value)
    if name in BOUNDS:
        value = inward(name, value)
    if name in _NUMBERS:
        _check_exact(value, where)
    return 0 if isinstance(value, float) and value == 0 else value  # for llguidance, -0.0 is below 0


def _check_exact(value: Any, where: str) -> None:
    """Refuse numbers that llguidance does not read exactly, and texts that need `\\u` escapes."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            _check_exact(each, where)
    elif isinstance(value, int | float) and not is_exact(value):
        raise SchemaError(f"{where} cannot be enforced: {brief(value)} is not below 2**53, or has more than 15 digits")
    elif isinstance(value, str) and (found := _UNWRITABLE.search(value)):
        raise SchemaError(f"{where} cannot be enforced: a text with U+{ord(found[0]):04X} is not supported")


def _narrow(schema: dict[str, Any]) -> None:
    """Add the pattern of `_NARROWER` for a format that llguidance enforces only in part."""
    pattern = _NARROWER.get(schema.get("format", ""))
    if pattern is None:
        return
    if schema["format"] == "hostname":
        schema["maxLength"] = min(schema.get("maxLength", _HOST_CHARS), _HOST_CHARS)
    if "pattern" not in schema:
        schema["pattern"] = pattern
    else:
        schema["allOf"] = [*schema.get("allOf", ()), {"pattern": pattern}]


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
_SHAPES: Mapping[str, _Shape] = {
    "type": (f"one or more of {', '.join(sorted(_TYPES))}", _is_type),
    "pattern": _TEXT,
    "format": _TEXT,
    "required": ("a list of texts", _is_texts),
    "enum": ("a list that is not empty", lambda value: isinstance(value, list) and bool(value)),
    "const": ("any value", lambda value: True),
    "multipleOf": ("a number above 0", lambda value: is_number(value) and value > 0),
    **dict.fromkeys(_COUNTS, ("a whole number of at least 0", _is_count)),
    **dict.fromkeys(BOUNDS, _BOUND),
    **dict.fromkeys(_LISTS, _LIST),
    **dict.fromkeys(_MAPS, _OBJECT),
}
"""Required form of each keyword's value, in words and as a check. Draft 4's exclusive bounds may be booleans."""
