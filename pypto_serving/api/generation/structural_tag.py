"""Write a structural tag as a Lark grammar: text whose parts follow formats of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pypto_serving.api.generation.tag_format import FormatWriter
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.types.guide import Grammar
from pypto_serving.util import brief

MAX_STRUCTURES = 128


def lark_of(tag: Mapping[str, Any], options: Mapping[str, Any], tokenizer: Tokenizer) -> Grammar:
    """Return the grammar of `{"format": {...}}`, or of the older `{"structures": [...], "triggers": [...]}`.

    In the older form, text is free until a trigger; then one of the structures that begin with it must follow, and text
    again. Special tokens are matched as tokens. Raises ValueError, and SchemaError for a schema.
    """
    return FormatWriter(options, tokenizer).grammar(tag["format"] if "format" in tag else _triggered_tags(tag))


def _triggered_tags(tag: Mapping[str, Any]) -> dict[str, Any]:
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list) or not structures:
        raise ValueError("it must have a format, or lists of structures and triggers")
    if len(structures) > MAX_STRUCTURES:
        raise ValueError(f"it has {len(structures)} structures, but may have {MAX_STRUCTURES}")
    return {
        "type": "triggered_tags",
        "triggers": triggers,
        "tags": [_tag(i, each) for i, each in enumerate(structures)],
    }


def _tag(i: int, structure: Any) -> dict[str, Any]:
    if not isinstance(structure, Mapping) or not {"begin", "schema", "end"} <= structure.keys():
        raise ValueError(f"structures[{i}] is {brief(structure)}, but must have begin, schema and end")
    content = {"type": "json_schema", "json_schema": structure["schema"]}
    return {"type": "tag", "begin": structure["begin"], "content": content, "end": structure["end"]}
