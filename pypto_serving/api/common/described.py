"""JSON schemas for /openapi.json of fields that are read as they are, or whose bounds are checked elsewhere.

The bounds are those of the checks; a test holds both together. What depends on the model, on options or on other fields
is not described.
"""

from __future__ import annotations

from typing import Any

from pydantic import WithJsonSchema

from pypto_serving.api.chat.effort import EFFORTS
from pypto_serving.api.chat.messages import MAY_LACK_CONTENT
from pypto_serving.api.chat.tools import MAX_NAME_CHARS, MAX_TOOLS, MODES, NAME
from pypto_serving.types.sampling import (
    INT32_MAX,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_STOPS,
)

MAX_DOCUMENTS = 1024
_TEXT, _OBJECT = {"type": "string"}, {"type": "object"}
_TOKEN_ID = {"type": "integer", "minimum": 0, "maximum": INT32_MAX}


def _or_null(*schemas: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [*schemas, {"type": "null"}]})


def whole(low: int, high: int = INT32_MAX) -> WithJsonSchema:
    """Describe a whole number from `low` to `high`, or null."""
    return _or_null({"type": "integer", "minimum": low, "maximum": high})


def number(low: float, high: float) -> WithJsonSchema:
    """Describe a number from `low` to `high`, or null."""
    return _or_null({"type": "number", "minimum": low, "maximum": high})


def text(least: int, most: int) -> WithJsonSchema:
    """Describe a text of `least` to `most` characters, or null."""
    return _or_null({"type": "string", "minLength": least, "maxLength": most})


def _list(items: dict[str, Any], least: int = 0, most: int | None = None) -> dict[str, Any]:
    schema = {"type": "array", "items": items, "minItems": least, "maxItems": most}
    return {name: value for name, value in schema.items() if value}


def _typed(kind: str, **properties: dict[str, Any]) -> dict[str, Any]:
    """Describe an object with a `type`, all of whose `properties` are required."""
    return {
        "type": "object",
        "properties": {"type": {"const": kind}, **properties},
        "required": ["type", *properties],
    }


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


_STOP_TEXT = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_FUNCTION_NAME = {"type": "string", "maxLength": MAX_NAME_CHARS, "pattern": f"^{NAME.pattern}$"}
_FUNCTION = _object(
    name=_FUNCTION_NAME,
    description={"type": ["string", "null"]},
    parameters={"type": ["object", "null"]},
    strict={"type": ["boolean", "null"]},
) | {"required": ["name"]}
_TOOL = _object(type={"const": "function"}, function=_FUNCTION) | {"required": ["function"]}
_NAMED = _typed("function", function=_object(name=_FUNCTION_NAME) | {"required": ["name"]})
_ALLOWED = _object(mode={"enum": ["auto", "required"]}, tools=_list(_NAMED, 1, MAX_TOOLS)) | {
    "required": ["mode", "tools"]
}
_STRUCTURE = _object(begin=_TEXT, schema=_OBJECT, end=_TEXT) | {"required": ["begin", "schema", "end"]}
_TAG = {"structures": _list(_STRUCTURE, 1), "triggers": _list(_TEXT, 1)}

PROMPT = WithJsonSchema(
    {
        "anyOf": [
            _TEXT | {"minLength": 1},
            _list(_TEXT | {"minLength": 1}, 1),
            _list(_TOKEN_ID, 1),
            _list(_list(_TOKEN_ID, 1), 1),
        ]
    }
)
STOP = _or_null(_STOP_TEXT, _list(_STOP_TEXT, 0, MAX_STOPS))
STOP_IDS = _or_null(_list(_TOKEN_ID, 0, MAX_STOP_IDS))
ALLOWED_IDS = _or_null(_list(_TOKEN_ID, 1, MAX_BIASES))
BIASES = _or_null(
    {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": MAX_BIASES,
    }
)
BAD_WORDS = _or_null(_list({"type": "string", "maxLength": MAX_BAD_WORD_CHARS, "pattern": r"\S"}, 0, MAX_BAD_WORDS))
TRUNCATION = _or_null({"const": -1}, {"type": "integer", "minimum": 1, "maximum": INT32_MAX})
ABOVE_0_TO_1 = _or_null({"type": "number", "exclusiveMinimum": 0, "maximum": 1})
CONTENT = _or_null(_TEXT, _list(_typed("text", text=_TEXT)))
_CALL = _object(
    type={"const": "function"},
    function=_object(name=_TEXT | {"minLength": 1}, arguments={"type": ["string", "object", "null"]})
    | {"required": ["name"]},
) | {"required": ["function"]}
TOOLS = _or_null(_list(_TOOL, 0, MAX_TOOLS))
TOOL_CHOICE = _or_null({"enum": list(MODES)}, _NAMED, _typed("allowed_tools", allowed_tools=_ALLOWED))
EFFORT = _or_null({"enum": list(EFFORTS)})
RESPONSE_FORMAT = _or_null(
    _typed("text"),
    _typed("json_object"),
    _typed("json_schema", json_schema=_object(schema=_OBJECT) | {"required": ["schema"]}),
    _typed("structural_tag") | {"anyOf": [{"required": ["format"]}, {"properties": _TAG, "required": list(_TAG)}]},
)
JSON = _or_null(_OBJECT, _TEXT)
STRUCTURED = _or_null(_OBJECT)


def complete_message(schema: dict[str, Any]) -> None:
    """Describe the fields of a message that are read where they stand, and that only some roles may lack content."""
    texts: dict[str, Any] = {key: {"type": ["string", "null"]} for key in ("reasoning", "reasoning_content")}
    schema["properties"] |= texts | {"tool_calls": {"anyOf": [_list(_CALL), {"type": "null"}]}}
    schema["anyOf"] = [
        {"properties": {"role": {"enum": sorted(MAY_LACK_CONTENT)}}},
        {"properties": {"content": {"type": ["string", "array"]}}, "required": ["content"]},
    ]
