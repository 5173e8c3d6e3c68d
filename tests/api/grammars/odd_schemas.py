"""Schemas with values of every kind under every keyword."""

from __future__ import annotations

import random
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, -1, 1.5, 2**70, float("inf"), float("nan"), "", "object", "hostname", "date", "#", "#/$defs/a",
    "#/a/~2", "(", "\ud800", [], {}, ["a"], [{}], {"a": {}}, {"$ref": "#"},
)  # fmt: skip
KEYWORDS = (
    "type", "enum", "const", "minimum", "exclusiveMaximum", "multipleOf", "maxLength", "pattern", "format", "required",
    "minProperties", "items", "additionalItems", "prefixItems", "allOf", "anyOf", "oneOf", "properties",
    "patternProperties", "additionalProperties", "$ref", "$defs", "$id", "$schema",
)  # fmt: skip


def odd_value(rng: random.Random, depth: int) -> Any:
    if depth == 0 or rng.random() < 0.4:
        return rng.choice(ODD)
    if rng.random() < 0.3:
        return [odd_value(rng, depth - 1) for _ in range(rng.randrange(3))]
    return {rng.choice(KEYWORDS): odd_value(rng, depth - 1) for _ in range(rng.randrange(5))}
