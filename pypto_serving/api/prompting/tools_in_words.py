"""Describe tools, calls and results in the texts of messages, for templates that have no place for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from pypto_serving.api.chat.parsers.families import CallForm
from pypto_serving.api.chat.tools import as_object

FAMILY = "hermes"
"""The form of calls that the model is asked for."""
INSTRUCTING = ("system", "developer")
_INSTRUCTION = """You may call functions to help the user. They are described between <tools> and </tools>:
<tools>
%s
</tools>

To call a function, write a JSON object with its name and arguments between <tool_call> and </tool_call>:
<tool_call>
{"name": "the function's name", "arguments": {"a parameter": "its value"}}
</tool_call>
The result comes between <tool_response> and </tool_response>. Answer without a call if you need none."""


def in_words(messages: Sequence[Mapping[str, Any]], functions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose calls and results are texts; a system message describes the functions, if there are any."""
    texts = [_in_words(message) for message in messages]
    if not functions:
        return texts
    start = len(list(takewhile(lambda message: message["role"] in INSTRUCTING, messages)))
    described = [_json({"type": "function", "function": function}) for function in functions]
    return [*texts[:start], {"role": "system", "content": _INSTRUCTION % "\n".join(described)}, *texts[start:]]


def _in_words(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"}
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    calls = [call["function"] for call in message.get("tool_calls", ())]
    pairs = [_json({"name": call["name"], "arguments": call["arguments"]}) for call in calls]
    texts = [kept.get("content") or "", *(f"<tool_call>\n{pair}\n</tool_call>" for pair in pairs)]
    return {**kept, "content": "\n".join(filter(None, texts))} if pairs else kept


def calls_in_text(messages: Sequence[Mapping[str, Any]], form: CallForm) -> list[dict[str, Any]]:
    """Return messages whose calls stand in their texts as the model writes them. The form has JSON or Python."""
    return [_with_text(message, form) if "tool_calls" in message else dict(message) for message in messages]


def _with_text(message: Mapping[str, Any], form: CallForm) -> dict[str, Any]:
    written = []
    for call in message["tool_calls"]:
        arguments = as_object(call["function"]["arguments"])
        text = (
            _json(arguments)
            if form.arguments == "json"
            else ", ".join(f"{k}={_python(arguments[k])}" for k in arguments)
        )
        written.append(form.head + call["function"]["name"] + form.middle + text + form.tail)
    calls = form.begin + form.between.join(written) + form.end
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": "\n".join(filter(None, (kept.get("content"), calls)))}


def _python(value: Any) -> str:
    return _json(value) if isinstance(value, str) else repr(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
