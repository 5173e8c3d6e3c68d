"""Write a structural tag as a Lark grammar: free text in which some beginnings start a structured part."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pypto_serving.api.generation.json_schema import prepare
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.util import brief

MAX_STRUCTURES = 128


def lark_of(tag: Mapping[str, Any], options: Mapping[str, Any], tokenizer: Tokenizer) -> str:
    """Return the grammar of `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`.

    Text is free until a trigger; then one of the structures that begin with it must follow, and text again. A trigger
    that is a special token is matched as that token. Raises ValueError, and SchemaError for a schema.
    """
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list) or not structures:
        raise ValueError("it must have lists of structures and triggers; the form with `format` is not supported")
    if len(structures) > MAX_STRUCTURES:
        raise ValueError(f"it has {len(structures)} structures, but may have {MAX_STRUCTURES}")
    rules = [_rules(i, each, triggers, options, tokenizer) for i, each in enumerate(structures)]
    parts = " | ".join(f"tag_{i}" for i in range(len(structures)))
    return "\n".join([f"start: ({parts})* rest", "rest: TEXT", "TEXT: /(.|\\n)*/", *rules])


def _rules(i: int, structure: Any, triggers: Sequence[Any], options: Mapping[str, Any], tokenizer: Tokenizer) -> str:
    begin, schema, end = (
        (structure.get(name) for name in ("begin", "schema", "end"))
        if isinstance(structure, Mapping)
        else (None, None, None)
    )
    if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, Mapping):
        raise ValueError(f"structures[{i}] is {brief(structure)}, but must have begin, schema and end")
    trigger = next((t for t in triggers if isinstance(t, str) and t and begin.startswith(t)), None)
    if trigger is None:
        raise ValueError(f"structures[{i}].begin is {brief(begin)}, but must begin with one of the triggers")
    body = f"{_text(begin.removeprefix(trigger))} %json {json.dumps(prepare(schema, options))} {_text(end)}"
    token_id = tokenizer.raw.token_to_id(trigger)
    if token_id in tokenizer.special_ids:
        return f"tag_{i}: TEXT <[{token_id}]> {body}"
    return f"head_{i}[lazy]: TEXT {_text(trigger)}\ntag_{i}: head_{i} {body}"


def _text(text: str) -> str:
    return json.dumps(text) if text else ""
