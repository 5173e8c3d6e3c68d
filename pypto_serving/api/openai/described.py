"""JSON schemas for /openapi.json of OpenAI's fields that are read as they are."""

from __future__ import annotations

from typing import Any

from pydantic import WithJsonSchema

from pypto_serving.api.chat.messages import MAY_LACK_CONTENT
from pypto_serving.api.chat.tools import EFFORTS, MAX_NAME_CHARS, MAX_TOOLS, MODES, NAME
from pypto_serving.api.common.described import (
    FLAG,
    MAY_TEXT,
    OBJECT,
    TEXT,
    list_of,
    object_of,
    or_null,
    typed,
)
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
_TOKEN_ID = {"type": "integer", "minimum": 0, "maximum": INT32_MAX}
_STOP_TEXT = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_FUNCTION_NAME = {"type": "string", "maxLength": MAX_NAME_CHARS, "pattern": f"^{NAME.pattern}$"}
_PARAMETERS = {"type": ["object", "null"]}
_FUNCTION = object_of({"name": _FUNCTION_NAME}, description=MAY_TEXT, parameters=_PARAMETERS, strict=FLAG)
_TOOL = object_of({"function": _FUNCTION}, type={"const": "function"})
_NAMED = typed("function", {"function": object_of({"name": _FUNCTION_NAME})})
_ALLOWED = object_of({"mode": {"enum": ["auto", "required"]}, "tools": list_of(_NAMED, 1, MAX_TOOLS)})
_STRUCTURE = object_of({"begin": TEXT, "schema": OBJECT, "end": TEXT})
_TAG = {"structures": list_of(_STRUCTURE, 1), "triggers": list_of(TEXT, 1)}

PROMPT = WithJsonSchema(
    {
        "anyOf": [
            TEXT | {"minLength": 1},
            list_of(TEXT | {"minLength": 1}, 1),
            list_of(_TOKEN_ID, 1),
            list_of(list_of(_TOKEN_ID, 1), 1),
        ]
    }
)
STOP = or_null(_STOP_TEXT, list_of(_STOP_TEXT, 0, MAX_STOPS))
STOP_IDS = or_null(list_of(_TOKEN_ID, 0, MAX_STOP_IDS))
ALLOWED_IDS = or_null(list_of(_TOKEN_ID, 1, MAX_BIASES))
BIASES = or_null(
    {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": MAX_BIASES,
    }
)
BAD_WORDS = or_null(list_of({"type": "string", "maxLength": MAX_BAD_WORD_CHARS, "pattern": r"\S"}, 0, MAX_BAD_WORDS))
TRUNCATION = or_null({"const": -1}, {"type": "integer", "minimum": 1, "maximum": INT32_MAX})
CONTENT = or_null(TEXT, list_of(typed("text", {"text": TEXT})))
_ARGUMENTS = {"type": ["string", "object", "null"]}
_CALLED = object_of({"name": TEXT | {"minLength": 1}}, arguments=_ARGUMENTS)
_CALL = object_of({"function": _CALLED}, type={"const": "function"})
TOOLS = or_null(list_of(_TOOL, 0, MAX_TOOLS))
TOOL_CHOICE = or_null({"enum": list(MODES)}, _NAMED, typed("allowed_tools", {"allowed_tools": _ALLOWED}))
EFFORT = or_null({"enum": list(EFFORTS)})
RESPONSE_FORMAT = or_null(
    typed("text"),
    typed("json_object"),
    typed("json_schema", {"json_schema": object_of({"schema": OBJECT})}),
    typed("structural_tag") | {"anyOf": [{"required": ["format"]}, {"properties": _TAG, "required": list(_TAG)}]},
)
JSON = or_null(OBJECT, TEXT)
STRUCTURED = or_null(OBJECT)


def complete_message(schema: dict[str, Any]) -> None:
    """Describe the fields of a message that are read where they stand, and that only some roles may lack content."""
    texts: dict[str, Any] = dict.fromkeys(("reasoning", "reasoning_content"), MAY_TEXT)
    schema["properties"] |= texts | {"tool_calls": {"anyOf": [list_of(_CALL), {"type": "null"}]}}
    schema["anyOf"] = [
        {"properties": {"role": {"enum": sorted(MAY_LACK_CONTENT)}}},
        {"properties": {"content": {"type": ["string", "array"]}}, "required": ["content"]},
    ]
