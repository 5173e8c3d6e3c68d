"""Write a structural tag as a Lark grammar: text whose parts follow formats of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pypto_serving.api.grammars.tag_format import FormatWriter
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.types.guide import Grammar
from pypto_serving.util import brief

MAX_STRUCTURES = 128
_FIELDS = {"begin", "schema", "end"}


def lark_of(tag: Mapping[str, Any], options: Mapping[str, Any], tokenizer: Tokenizer) -> Grammar:
    """Return the grammar of `{"format": {...}}`, or of the older `{"structures": [...], "triggers": [...]}`.

    In the older form, text is free until a trigger; then one of the structures that begin with it must follow, and text
    again. Special tokens are matched as tokens. Raises ValueError, and SchemaError for a schema.
    """
    given = tag["format"] if "format" in tag else _triggered_tags(tag)
    _check_known(tag, "it", {"type", "format"} if "format" in tag else {"type", "structures", "triggers"})
    return FormatWriter(options, tokenizer).grammar(given)


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
    if not isinstance(structure, Mapping) or not structure.keys() >= _FIELDS:
        raise ValueError(f"structures[{i}] is {brief(structure)}, but must have begin, schema and end")
    _check_known(structure, f"structures[{i}]", _FIELDS)
    content = {"type": "json_schema", "json_schema": structure["schema"]}
    return {"type": "tag", "begin": structure["begin"], "content": content, "end": structure["end"]}


def _check_known(given: Mapping[str, Any], place: str, fields: set[str]) -> None:
    if unknown := sorted(map(str, given.keys() - fields)):
        raise ValueError(f"{place} has {brief(unknown[0])}, but may have {', '.join(sorted(fields))}")
