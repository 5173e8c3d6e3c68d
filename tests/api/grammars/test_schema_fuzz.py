"""Random schemas that join keywords in every way allow nothing that jsonschema refuses."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from pypto_serving.api.grammars.json_schema import SchemaError, prepare
from pypto_serving.guidance import GrammarError
from tests.api.generation.following import accepts, matcher_of
from tests.api.grammars.odd_schemas import KEYWORDS, odd_value

NAMES = ("a", "b", "ab")
LEAVES: tuple[Any, ...] = (
    {"type": "integer"}, {"type": "string"}, {"const": 1}, {"enum": [1, "x", None]}, {"type": ["null", "string"]},
    {"type": "array", "items": {"type": "integer"}}, {"minimum": 2}, {"maxLength": 1}, {"pattern": "^a"},
    {"exclusiveMinimum": 1, "maximum": 1.5}, {"type": "object"}, {}, True, False,
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    1, 2, 1.5, "x", "a", None, True, [], [1], [1, "x"], ["x"], [1, 2], [None, 1, "x"], {}, {"a": 1}, {"a": {"b": 1}},
)  # fmt: skip
OBJECTS = [
    dict(zip(names, values, strict=True))
    for count in range(1, 4)
    for names in itertools.permutations(NAMES, count)
    for values in itertools.product([1, "x", None, [1]], repeat=count)
]


class Joiner:
    """Makes a schema from a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def make(self) -> Any:
        return {**self.schema(2, whole=True), "$defs": {"x": self.leaf(), "y": self.schema(1)}}

    def leaf(self) -> Any:
        return self.rng.choice(LEAVES)

    def schema(self, depth: int, whole: bool = False) -> Any:
        if not whole and (depth == 0 or self.rng.random() < 0.2):
            return self.leaf()
        pick, count = self.rng.choice, self.rng.randrange
        keywords: dict[str, Callable[[], Any]] = {
            "properties": lambda: {name: self.schema(depth - 1) for name in self.rng.sample(NAMES, count(3))},
            "additionalProperties": lambda: self.schema(depth - 1),
            "patternProperties": lambda: {pick(["^a", "b$", "^ab$"]): self.schema(depth - 1)},
            "required": lambda: self.rng.sample(NAMES, count(3)),
            "minProperties": lambda: count(3),
            "maxProperties": lambda: count(3),
            "prefixItems": lambda: [self.schema(depth - 1) for _ in range(1 + count(2))],
            "items": lambda: self.schema(depth - 1),
            "maxItems": lambda: count(3),
            "allOf": lambda: [self.schema(depth - 1) for _ in range(1 + count(2))],
            "anyOf": lambda: [self.schema(depth - 1) for _ in range(1 + count(3))],
            "oneOf": lambda: [self.schema(depth - 1) for _ in range(1 + count(3))],
            "type": lambda: pick(["object", "array", ["object", "null"], ["array", "integer"]]),
            "enum": lambda: self.rng.sample(VALUES, 3),
            "$ref": lambda: pick(["#/$defs/x", "#/$defs/y"]),
        }
        return {name: keywords[name]() for name in self.rng.sample(sorted(keywords), 1 + count(4))}


def sweep(seeds: range, num_objects: int) -> tuple[int, int]:
    """How many schemas were taken, and how many values they allowed; each must be valid."""
    num_taken = num_allowed = 0
    for seed in seeds:
        schema = Joiner(seed).make()
        try:
            matcher = matcher_of(schema)
        except (SchemaError, GrammarError):
            continue
        num_taken += 1
        validator = jsonschema.Draft202012Validator(schema)
        for value in (*VALUES, *random.Random(seed).sample(OBJECTS, num_objects)):
            if accepts(matcher, json.dumps(value)):
                num_allowed += 1
                assert validator.is_valid(value), (schema, value)
    return num_taken, num_allowed


def test_nothing_invalid_is_allowed() -> None:
    num_taken, num_allowed = sweep(range(60), 12)
    assert num_taken > 30 and num_allowed > 150, (num_taken, num_allowed)


def test_whatever_stands_in_a_schema_is_taken_or_refused() -> None:
    found = {"taken": 0, "refused": 0}
    for seed in range(3000):
        rng = random.Random(seed)
        schema = {rng.choice(KEYWORDS): odd_value(rng, 3) for _ in range(rng.randrange(1, 5))}
        try:
            json.dumps(prepare(schema, {}))
            found["taken"] += 1
        except SchemaError as error:
            assert re.search("cannot be enforced|but must be", str(error))
            found["refused"] += 1
    assert min(found.values()) > 200, found


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_nothing_invalid_is_allowed_by_thousands() -> None:
    num_taken, num_allowed = sweep(range(1000, 6000), 100)
    assert num_taken > 2500 and num_allowed > 50_000, (num_taken, num_allowed)
