"""Read the messages of a conversation, from HTTP and from programs. Raises RequestError that names the place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
