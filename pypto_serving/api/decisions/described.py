"""JSON schemas for /openapi.json of fields that are read as they are. Their bounds are those of the checks."""

from __future__ import annotations

from typing import Any

from pydantic import WithJsonSchema

from pypto_serving.api.common.schemas import MAX_MESSAGES

MAX_QUESTIONS, MAX_OPTIONS, MAX_LEVELS = 400, 255, 10
MAX_NAME_CHARS = 1024
_TEXT, _MAY_TEXT = {"type": "string"}, {"type": ["string", "null"]}


def _object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {"type": "object", "properties": required | optional, "required": list(required)}


def _typed(kind: str, required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return _object({"type": {"const": kind}, **required}, **optional)


def _list(items: dict[str, Any], least: int = 0, most: int | None = None) -> dict[str, Any]:
    schema = {"type": "array", "items": items, "minItems": least, "maxItems": most}
    return {name: value for name, value in schema.items() if value}


def _content(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [_TEXT, _list({"anyOf": list(parts)})]}


_WORDS = _typed("input_text", {"text": _TEXT})
_JSON = _typed("input_json", {"data": {"anyOf": [{"type": "object"}, {"type": "array", "items": {"type": "object"}}]}})
_SAID = [_typed("output_text", {"text": _TEXT}), _typed("refusal", {"refusal": _TEXT})]
_MESSAGE = {"const": "message"}
_ITEMS = [
    _object({"role": {"const": "user"}, "content": _content(_WORDS, _JSON)}, type=_MESSAGE),
    _object({"role": {"enum": ["developer", "system"]}, "content": _content(_WORDS)}, type=_MESSAGE),
    _object({"role": {"const": "assistant"}, "content": _content(*_SAID)}, type=_MESSAGE),
    _typed("function_call", {"call_id": _TEXT, "name": _TEXT, "arguments": _TEXT}),
    _typed("function_call_output", {"call_id": _TEXT, "output": _content(_WORDS)}),
    _typed("custom_tool_call", {"call_id": _TEXT, "name": _TEXT, "input": _TEXT}),
    _typed("custom_tool_call_output", {"call_id": _TEXT, "output": _content(_WORDS)}),
]
_NAME = {"type": ["string", "null"], "maxLength": MAX_NAME_CHARS}
_ASKED = {"instructions": _content(_WORDS, _JSON)}
_CHOICE = _object({"value": {"type": ["string", "boolean"]}}, description=_MAY_TEXT)
_LEVEL = _object({"label": _TEXT}, description=_MAY_TEXT)
_QUESTIONS = [
    _typed("predicate", _ASKED, name=_NAME),
    _typed("choice", {**_ASKED, "choices": _list(_CHOICE, 2, MAX_OPTIONS)}, name=_NAME),
    _typed("score", {**_ASKED, "levels": _list(_LEVEL, 2, MAX_LEVELS)}, name=_NAME),
]

INPUT = WithJsonSchema({"anyOf": [_TEXT | {"minLength": 1}, _list({"anyOf": _ITEMS}, 1, MAX_MESSAGES)]})
QUESTIONS = WithJsonSchema(_list({"anyOf": _QUESTIONS}, 1, MAX_QUESTIONS))
