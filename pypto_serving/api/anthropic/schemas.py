"""Describe the bodies of messages. Unknown fields are kept, to be named in the answer."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema

from pypto_serving.api.chat.tools import EFFORTS, MAX_NAME_CHARS, MAX_TOOLS, NAME
from pypto_serving.api.common.body import MAX_MESSAGES, Body, FieldRules
from pypto_serving.api.common.described import (
    ABOVE_0_TO_1,
    FLAG,
    MAY_TEXT,
    OBJECT,
    TEXT,
    list_of,
    number,
    object_of,
    or_null,
    typed,
    whole,
)
from pypto_serving.types.sampling import INT32_MAX, MAX_STOP_CHARS, MAX_STOPS

_NAME = {"type": "string", "maxLength": MAX_NAME_CHARS, "pattern": f"^{NAME.pattern}$"}
_WORDS = typed("text", {"text": TEXT})
_TEXTS = {"anyOf": [TEXT, list_of(_WORDS)]}
_RESULT = object_of(
    {"type": {"const": "tool_result"}, "tool_use_id": TEXT},
    content={"anyOf": [*_TEXTS["anyOf"], {"type": "null"}]},
    is_error=FLAG,
)
_SAID = [_WORDS, typed("thinking", {"thinking": TEXT}), typed("redacted_thinking")]
_CALL = typed("tool_use", {"id": TEXT, "name": TEXT, "input": OBJECT})
_TURNS = [
    object_of({"role": {"const": "user"}, "content": {"anyOf": [TEXT, list_of({"anyOf": [_WORDS, _RESULT]})]}}),
    object_of({"role": {"const": "assistant"}, "content": {"anyOf": [TEXT, list_of({"anyOf": [*_SAID, _CALL]})]}}),
    object_of({"role": {"const": "system"}, "content": _TEXTS}),
]
_TOOL = object_of(
    {"name": _NAME, "input_schema": OBJECT},
    type={"enum": ["custom", None]},
    description=MAY_TEXT,
    strict=FLAG,
)
_CHOICES = [typed("auto"), typed("any"), typed("none"), typed("tool", {"name": _NAME})]
_BUDGET = {"type": "integer", "minimum": 1, "maximum": INT32_MAX}
_DISPLAY = {"enum": ["summarized", "omitted", None]}
MESSAGES = WithJsonSchema({"type": "array", "items": {"anyOf": _TURNS}, "minItems": 1, "maxItems": MAX_MESSAGES})
SYSTEM = or_null(*_TEXTS["anyOf"])
TOOLS = or_null(list_of(_TOOL) | {"maxItems": MAX_TOOLS})
TOOL_CHOICE = or_null(
    *(one | {"properties": one["properties"] | {"disable_parallel_tool_use": FLAG}} for one in _CHOICES)
)
THINKING = or_null(
    object_of({"type": {"const": "enabled"}}, budget_tokens={"anyOf": [_BUDGET, {"type": "null"}]}, display=_DISPLAY),
    object_of({"type": {"const": "adaptive"}}, display=_DISPLAY),
    typed("disabled"),
)
OUTPUT_CONFIG = or_null(
    {
        "type": "object",
        "properties": {
            "effort": {"enum": [*EFFORTS, None]},
            "format": {"anyOf": [typed("json_schema", {"schema": OBJECT}), {"type": "null"}]},
        },
    }
)
NOTHING = WithJsonSchema({"type": "null", "description": "Not supported."})
MAX_TOKENS = WithJsonSchema({"type": "integer", "minimum": 0, "maximum": INT32_MAX})
STOPS = or_null(list_of({"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}) | {"maxItems": MAX_STOPS})


class CountTokensBody(Body):
    """The body of POST /v1/messages/count_tokens: a conversation."""

    rules: ClassVar[FieldRules] = FieldRules(
        {"container": (), "mcp_servers": ([],)},
        frozenset(
            {
                "cache_control",
                "diagnostics",
                "inference_geo",
                "metadata",
                "service_tier",
                "speed",
                "user_profile_id",
                "workspace_id",
            }
        ),
    )
    """Prefixes are cached without being asked, so `cache_control` changes nothing."""

    model: str | None = None
    messages: Annotated[list[Any], MESSAGES] = Field(fail_fast=True, max_length=MAX_MESSAGES)
    system: Annotated[Any, SYSTEM] = None
    tools: Annotated[Any, TOOLS] = None
    tool_choice: Annotated[Any, TOOL_CHOICE] = None
    thinking: Annotated[Any, THINKING] = None
    output_config: Annotated[Any, OUTPUT_CONFIG] = None
    thread: Annotated[Any, NOTHING] = None


class MessagesBody(CountTokensBody):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[int, MAX_TOKENS]
    stream: bool | None = None
    stop_sequences: Annotated[list[str] | None, STOPS] = Field(None, fail_fast=True, max_length=MAX_STOPS)
    temperature: Annotated[float | None, number(0, 100)] = None
    top_p: Annotated[float | None, ABOVE_0_TO_1] = None
    top_k: Annotated[int | None, whole(-1)] = None
