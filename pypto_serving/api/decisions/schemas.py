"""Describe the body of POST /v1/decisions. Unknown fields are kept, to be named in the answer."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema

from pypto_serving.api.common.body import MAX_MESSAGES, MAX_SALT_CHARS, Body, FieldRules
from pypto_serving.api.common.described import MAY_TEXT, TEXT, list_of, object_of, text, typed

MAX_QUESTIONS, MAX_OPTIONS, MAX_LEVELS = 400, 255, 10
MAX_NAME_CHARS = 1024


def _content(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [TEXT, list_of({"anyOf": list(parts)})]}


_WORDS = typed("input_text", {"text": TEXT})
_JSON = typed("input_json", {"data": {"anyOf": [{"type": "object"}, {"type": "array", "items": {"type": "object"}}]}})
_SAID = [typed("output_text", {"text": TEXT}), typed("refusal", {"refusal": TEXT})]
_MESSAGE = {"const": "message"}
_ITEMS = [
    object_of({"role": {"const": "user"}, "content": _content(_WORDS, _JSON)}, type=_MESSAGE),
    object_of({"role": {"enum": ["developer", "system"]}, "content": _content(_WORDS)}, type=_MESSAGE),
    object_of({"role": {"const": "assistant"}, "content": _content(*_SAID)}, type=_MESSAGE),
    typed("function_call", {"call_id": TEXT, "name": TEXT, "arguments": TEXT}),
    typed("function_call_output", {"call_id": TEXT, "output": _content(_WORDS)}),
    typed("custom_tool_call", {"call_id": TEXT, "name": TEXT, "input": TEXT}),
    typed("custom_tool_call_output", {"call_id": TEXT, "output": _content(_WORDS)}),
]
_NAME = {"type": ["string", "null"], "maxLength": MAX_NAME_CHARS}
_ASKED = {"instructions": _content(_WORDS, _JSON)}
_CHOICE = object_of({"value": {"type": ["string", "boolean"]}}, description=MAY_TEXT)
_LEVEL = object_of({"label": TEXT}, description=MAY_TEXT)
_QUESTIONS = [
    typed("predicate", _ASKED, name=_NAME),
    typed("choice", {**_ASKED, "choices": list_of(_CHOICE, 2, MAX_OPTIONS)}, name=_NAME),
    typed("score", {**_ASKED, "levels": list_of(_LEVEL, 2, MAX_LEVELS)}, name=_NAME),
]
INPUT = WithJsonSchema({"anyOf": [TEXT | {"minLength": 1}, list_of({"anyOf": _ITEMS}, 1, MAX_MESSAGES)]})
QUESTIONS = WithJsonSchema(list_of({"anyOf": _QUESTIONS}, 1, MAX_QUESTIONS))


class DecisionBody(Body):
    """The body of POST /v1/decisions. `prompt_cache_key` parts the prefix cache, as a cache salt does."""

    rules: ClassVar[FieldRules] = FieldRules(
        {"stream": (False,)}, frozenset({"prompt_cache_options", "safety_identifier"})
    )
    """Prefixes are cached without being asked, so `prompt_cache_options` changes nothing."""

    model: str | None = None
    input: Annotated[Any, INPUT]
    questions: Annotated[list[Any], QUESTIONS] = Field(fail_fast=True, max_length=MAX_QUESTIONS)
    prompt_cache_key: Annotated[str | None, text(0, MAX_SALT_CHARS)] = Field(None, max_length=MAX_SALT_CHARS)
