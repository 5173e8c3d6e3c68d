"""Random JSON schemas over the keywords of JSON Schema, bounded so that a random answer ends."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from pypto_serving.types.guide import Grammar

Schema = dict[str, Any]

NAMES = ("id", "name", "a", "b", "größe", "x-y", "with space", 'qu"ote', "back\\slash", "日本", "0", "")
PATTERNS = (
    "^[a-c]{1,4}$",
    "^(ab|cd){1,3}$",
    "[0-9]{2}-[0-9]{2}$",
    r"^\d{1,3}(\.\d{1,2})?$",
    "^x",
    r"^\w{1,8}$",
    r"^[^\s]{1,5}$",
)
FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
VALUES = (
    None,
    True,
    False,
    0,
    -7,
    12345,
    1.5,
    -0.25,
    "",
    "text",
    'a "quote"',
    "back\\slash",
    "über",
    "😀",
    "<|im_end|>",
    [],
    [1, "a"],
    {"k": 1},
)
LIST: Schema = {
    "type": "object",
    "properties": {"next": {"anyOf": [{"$ref": "#/$defs/list"}, {"type": "null"}, {"const": 1}]}},
    "required": ["next"],
    "additionalProperties": False,
}
UNSUPPORTED: tuple[Schema, ...] = (
    {"not": {"type": "string"}},
    {"if": {"type": "string"}, "then": {"maxLength": 3}},
    {"type": "array", "uniqueItems": True},
    {"type": "array", "contains": {"type": "integer"}},
    {"type": "object", "propertyNames": {"maxLength": 3}},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
    {"type": "object", "unevaluatedProperties": False},
    {"type": "object", "minProperties": 4},
    {"type": "string", "format": "unheard-of"},
    {"type": "string", "pattern": "(?=a)b"},
    {"const": 2**53 + 1},
    {"$ref": "https://example.com/other.json"},
)


class SchemaMaker:
    """Makes schemas from a seed; `make` is a whole one, perhaps with definitions."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.defs: dict[str, Schema] = {}

    def make(self) -> Schema:
        self.defs = {"list": LIST} if self.rng.random() < 0.1 else {}
        made = self.schema(3)
        if self.defs:
            made = {**made, "$defs": self.defs}
        if self.rng.random() < 0.3:
            made = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "T", "x-note": 1, **made}
        return made

    def schema(self, depth: int) -> Schema:
        leaves: list[Callable[[], Schema]] = [
            self.string,
            self.string,
            self.integer,
            self.number,
            self.const,
            self.enum,
            self.simple,
        ]
        if depth == 0:
            return self.rng.choice(leaves)()
        branches: list[Callable[[int], Schema]] = [
            self.object,
            self.object,
            self.object,
            self.array,
            self.any_of,
            self.all_of,
            self.reference,
            self.map,
        ]
        return self.rng.choice(branches)(depth - 1) if self.rng.random() < 0.7 else self.rng.choice(leaves)()

    def simple(self) -> Schema:
        return {"type": self.rng.choice(["boolean", "null", ["boolean", "null"], ["integer", "null"]])}

    def string(self) -> Schema:
        rng = self.rng
        kind = rng.randrange(4)
        if kind == 0:
            return {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 30}
        if kind == 1:
            return {"type": "string", "format": rng.choice(FORMATS), "maxLength": 60}
        least = rng.randrange(4)
        return {"type": "string", "minLength": least, "maxLength": least + rng.randrange(12)}

    def integer(self) -> Schema:
        rng = self.rng
        low = rng.randrange(-1000, 1000)
        made: Schema = {"type": "integer", rng.choice(["minimum", "exclusiveMinimum"]): low}
        made[rng.choice(["maximum", "exclusiveMaximum"])] = low + rng.randrange(20, 5000)
        if rng.random() < 0.3:
            made["multipleOf"] = rng.choice([2, 3, 5, 10])
        return made

    def number(self) -> Schema:
        rng = self.rng
        low = round(rng.uniform(-100, 100), rng.randrange(4))
        made: Schema = {"type": "number", rng.choice(["minimum", "exclusiveMinimum"]): low}
        made[rng.choice(["maximum", "exclusiveMaximum"])] = low + rng.randrange(1, 300)
        return made

    def const(self) -> Schema:
        return {"const": self.rng.choice(VALUES)}

    def enum(self) -> Schema:
        return {"enum": self.rng.sample(VALUES, self.rng.randrange(1, 6))}

    def object(self, depth: int) -> Schema:
        rng = self.rng
        names = rng.sample(NAMES, rng.randrange(5))
        made: Schema = {"type": "object", "properties": {name: self.schema(depth) for name in names}}
        if rng.random() < 0.7:
            made["required"] = rng.sample(names, rng.randrange(len(names) + 1))
        if rng.random() < 0.8:
            made["additionalProperties"] = False
        else:
            made["additionalProperties"] = self.schema(0)
            made["maxProperties"] = len(names)
            if len(made.get("required", ())) != len(names):
                del made["maxProperties"]
        return made

    def map(self, depth: int) -> Schema:
        rng = self.rng
        made: Schema = {"type": "object", "patternProperties": {"^k[0-9]{1,2}$": self.schema(depth)}}
        if rng.random() < 0.5:
            made |= {"minProperties": 1, "maxProperties": 3}
        return {**made, "additionalProperties": False}

    def array(self, depth: int) -> Schema:
        rng = self.rng
        least = rng.randrange(3)
        made: Schema = {
            "type": "array",
            "items": self.schema(depth),
            "minItems": least,
            "maxItems": least + rng.randrange(3),
        }
        if rng.random() < 0.3:
            made["prefixItems"] = [self.schema(depth) for _ in range(rng.randrange(1, 3))]
            made["maxItems"] += 2
        return made

    def any_of(self, depth: int) -> Schema:
        name = self.rng.choice(["anyOf", "oneOf"])
        options = [self.schema(depth) for _ in range(self.rng.randrange(1, 4))]
        if name == "oneOf":
            options = [
                {
                    "type": "object",
                    "properties": {"kind": {"const": f"k{i}"}, "v": option},
                    "required": ["kind", "v"],
                    "additionalProperties": False,
                }
                for i, option in enumerate(options)
            ]
        return {name: options}

    def all_of(self, depth: int) -> Schema:
        first, second = self.object(depth), self.object(depth)
        if self.rng.random() < 0.5:
            first.pop("additionalProperties", None)
            second.pop("additionalProperties", None)
        return {"allOf": [first, second]}

    def reference(self, depth: int) -> Schema:
        if not self.defs or self.rng.random() < 0.5:
            made = self.schema(depth)
            self.defs[f"d{len(self.defs)}"] = made
        return {"$ref": f"#/$defs/{self.rng.choice(list(self.defs))}"}


def ambiguous_grammar(size: int) -> Grammar:
    """Rules whose texts have derivations beyond counting, behind a plain beginning that hides them."""
    rules = [
        f"s{i}: " + " | ".join(f"s{j} s{(j * 7 + i) % size}" for j in range(size)) + ' | "a" |' for i in range(size)
    ]
    return Grammar("lark", "\n".join(["start: /[0-9]{3}-/ s0", *rules]))
