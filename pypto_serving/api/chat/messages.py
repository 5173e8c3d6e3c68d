"""Read the messages of a conversation, and bring them into the form that templates expect. Raises RequestError."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pypto_serving.api.chat.tools import read_function, refuse
from pypto_serving.errors import RequestError
from pypto_serving.util import brief

MAY_LACK_CONTENT = frozenset({"assistant", "tool", "function"})


def read_message(message: Any, where: str) -> dict[str, Any]:
    """Return a message for encoders: `content` is text, with text parts joined, "" where it may be left out."""
    if not isinstance(message, Mapping):
        raise _wrong(where, message, "a message with role and content, such as {'role': 'user', 'content': 'Hello'}")
    role, content = message.get("role"), message.get("content")
    if role is None or (content is None and role not in MAY_LACK_CONTENT):
        missing = f"{where}.{'role' if role is None else 'content'}"
        raise RequestError(f"{missing} is missing; send a string", param=missing, code="missing_field")
    if not isinstance(role, str):
        raise _wrong(f"{where}.role", role, "a string")
    if isinstance(content, list | tuple):
        content = "\n".join(_part_text(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    if not isinstance(content, str | None):
        raise _wrong(f"{where}.content", content, "a string or a list of text parts")
    return {**message, "content": content or ""}


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else part
    message = f"{where} is a part of type {brief(kind)}; this model reads only parts {{'type': 'text', 'text': ...}}"
    raise RequestError(message, param=where, code="unsupported_content")


def _wrong(where: str, value: object, allowed: str) -> RequestError:
    return RequestError(f"{where} is {brief(value)}, but must be {allowed}", param=where, code="invalid_type")


def template_messages(messages: Sequence[Mapping[str, Any]], knows_developers: bool = True) -> list[dict[str, Any]]:
    """Return messages for a template. Raises RequestError that names the place.

    - Fields that are null are left out, and so is an empty list of calls: templates ask whether they are there.
    - The arguments of a call are an object; text that is none, which a model may write, stays text.
    - Reasoning has both of its names.
    - For a template that knows no developers, their messages are the system's.
    """
    given = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    for message in given:
        if message["role"] == "developer" and not knows_developers:
            message["role"] = "system"
    return given


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    made = {name: value for name, value in message.items() if value is not None}
    calls = made.pop("tool_calls", None)
    if calls is not None and not isinstance(calls, list):
        form = "{'id': ..., 'function': {'name': ..., 'arguments': ...}}"
        refuse(f"{where}.tool_calls", f"is {brief(calls)}, but must be a list of {form}")
    if calls:
        made["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    for name in ("reasoning_content", "reasoning"):
        if not isinstance(made.get(name), str | None):
            refuse(f"{where}.{name}", f"is {brief(made[name])}, but must be a string")
    if thought := made.get("reasoning_content") or made.get("reasoning"):
        made |= {"reasoning_content": thought, "reasoning": thought}
    return made


def _call(call: Any, where: str) -> dict[str, Any]:
    function = read_function(call, where)
    arguments = function.get("arguments")
    if not isinstance(arguments, str | dict | None):
        refuse(f"{where}.function.arguments", f"is {brief(arguments)}, but must be a JSON object, as text")
    if isinstance(arguments, str):
        arguments = _object(arguments)
    return {**call, "type": "function", "function": {**function, "arguments": {} if arguments is None else arguments}}


def _object(text: str) -> str | dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
