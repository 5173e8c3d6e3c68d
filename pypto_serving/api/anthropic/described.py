"""JSON schemas for /openapi.json of fields that are read as they are. Their bounds are those of the checks."""

from __future__ import annotations

from typing import Any

from pydantic import WithJsonSchema

from pypto_serving.api.chat.effort import EFFORTS
from pypto_serving.api.chat.tools import MAX_NAME_CHARS, MAX_TOOLS, NAME
from pypto_serving.api.common.schemas import MAX_MESSAGES
from pypto_serving.types.sampling import INT32_MAX, MAX_STOP_CHARS, MAX_STOPS

_TEXT, _OBJECT, _FLAG = {"type": "string"}, {"type": "object"}, {"type": ["boolean", "null"]}
_NAME = {"type": "string", "maxLength": MAX_NAME_CHARS, "pattern": f"^{NAME.pattern}$"}


def _object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {"type": "object", "properties": required | optional, "required": list(required)}


def _typed(kind: str, **required: Any) -> dict[str, Any]:
    return _object({"type": {"const": kind}, **required})


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _or_null(*schemas: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [*schemas, {"type": "null"}]})


_WORDS = _typed("text", text=_TEXT)
_TEXTS = {"anyOf": [_TEXT, _list(_WORDS)]}
_RESULT = _object(
    {"type": {"const": "tool_result"}, "tool_use_id": _TEXT},
    content={"anyOf": [*_TEXTS["anyOf"], {"type": "null"}]},
    is_error=_FLAG,
)
_SAID = [_WORDS, _typed("thinking", thinking=_TEXT), _typed("redacted_thinking")]
_CALL = _typed("tool_use", id=_TEXT, name=_TEXT, input=_OBJECT)
_TURNS = [
    _object({"role": {"const": "user"}, "content": {"anyOf": [_TEXT, _list({"anyOf": [_WORDS, _RESULT]})]}}),
    _object({"role": {"const": "assistant"}, "content": {"anyOf": [_TEXT, _list({"anyOf": [*_SAID, _CALL]})]}}),
    _object({"role": {"const": "system"}, "content": _TEXTS}),
]
_TOOL = _object(
    {"name": _NAME, "input_schema": _OBJECT},
    type={"enum": ["custom", None]},
    description={"type": ["string", "null"]},
    strict=_FLAG,
)
_CHOICES = [_typed("auto"), _typed("any"), _typed("none"), _typed("tool", name=_NAME)]
_BUDGET = {"type": "integer", "minimum": 1, "maximum": INT32_MAX}
_DISPLAY = {"enum": ["summarized", "omitted", None]}

MESSAGES = WithJsonSchema({"type": "array", "items": {"anyOf": _TURNS}, "minItems": 1, "maxItems": MAX_MESSAGES})
SYSTEM = _or_null(*_TEXTS["anyOf"])
TOOLS = _or_null(_list(_TOOL) | {"maxItems": MAX_TOOLS})
TOOL_CHOICE = _or_null(
    *(one | {"properties": one["properties"] | {"disable_parallel_tool_use": _FLAG}} for one in _CHOICES)
)
THINKING = _or_null(
    _object({"type": {"const": "enabled"}}, budget_tokens={"anyOf": [_BUDGET, {"type": "null"}]}, display=_DISPLAY),
    _object({"type": {"const": "adaptive"}}, display=_DISPLAY),
    _typed("disabled"),
)
OUTPUT_CONFIG = _or_null(
    {
        "type": "object",
        "properties": {
            "effort": {"enum": [*EFFORTS, None]},
            "format": {"anyOf": [_typed("json_schema", schema=_OBJECT), {"type": "null"}]},
        },
    }
)
NOTHING = WithJsonSchema({"type": "null", "description": "Not supported."})
MAX_TOKENS = WithJsonSchema({"type": "integer", "minimum": 0, "maximum": INT32_MAX})
STOPS = _or_null(_list({"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}) | {"maxItems": MAX_STOPS})
