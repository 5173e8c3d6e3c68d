"""Random tools, and how outputs that call them are read."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from pypto_serving.api.chat.formats import Calls, OutputFormat
from pypto_serving.api.chat.parsers.scanner import AssistantMessage, read_output
from pypto_serving.api.chat.tools import parameter_types
from tests.schemas import NAMES, SchemaMaker

Function = dict[str, Any]

TEXTS: tuple[dict[str, Any], ...] = (
    {},
    {"type": "string"},
    {"type": ["string", "null"]},
    {"anyOf": [{"type": "string"}, {"type": "null"}]},
    {"type": ["string", "integer"]},
    {"type": ["string", "object"]},
    {"enum": ["a", "b c", "null"]},
    {"enum": ["5 ", True, "t", "\nx\n"]},
    {"type": "string", "minLength": 2, "maxLength": 6},
    {"type": "string", "pattern": "^[a-c/]{1,4}$"},
    {"type": "string", "pattern": "a|b$"},
    {"oneOf": [{"enum": ["a", None]}, {"enum": ["b", True, None]}, {"type": "integer"}]},
    {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 2}]},
    {"type": "string", "format": "date"},
    {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "integer", "minimum": 5, "maximum": 9}]},
    {"type": "integer"},
    {"type": "object"},
    {"type": "array", "items": {"type": "string", "maxLength": 25}, "minItems": 1, "maxItems": 2},
    {"type": "object", "properties": {"k": {"type": "string"}}, "required": ["k"], "additionalProperties": False},
)
"""Schemas of parameters that are texts, or that hold some."""
NOT_NORMAL = ("e\u0301", "\ufb01x", "a\u00b7b", "\u0928\u093e\u092e", "class")
"""Names that Python writes in another way, or is not sure to read."""


def read(family: str, functions: Sequence[Function], text: str, one: bool = False) -> AssistantMessage:
    types = {function["name"]: parameter_types(function.get("parameters", {})) for function in functions}
    return read_output(OutputFormat(None, Calls(family, types, one, exact=True))(), [text])


def random_tool(rng: random.Random, number: int) -> Function:
    maker = SchemaMaker(rng.getrandbits(32))
    names = NAMES if rng.random() < 0.1 else ("id", "a", "größe", "日本", "from", "c1", *NOT_NORMAL)
    chosen = rng.sample(names, rng.randrange(4))
    properties = {name: rng.choice(TEXTS) if rng.random() < 0.6 else maker.schema(2) for name in chosen}
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    schema["required"] = [name for name in chosen if rng.random() < 0.6]
    if rng.random() < 0.5:
        schema["additionalProperties"] = False
    if maker.defs:
        schema["$defs"] = maker.defs
    return {"name": rng.choice(["f", "get_weather", "a.b"]) + str(number), "parameters": schema}


FIND: Function = {
    "name": "find",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 1, "maximum": 2}, "s": {"type": "string"}},
        "required": ["a"],
        "additionalProperties": False,
    },
}
LOOSE: Function = {"name": "look", "parameters": {"type": "object", "properties": {"z": {"type": "string"}}}}
