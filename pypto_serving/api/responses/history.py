"""Turn items into the messages of chat encoders. Raises RequestError that names the place."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from pypto_serving.api.chat.tools import refuse, string_in
from pypto_serving.api.common.body import MAX_MESSAGES
from pypto_serving.api.responses.tools import arguments_of, full_name
from pypto_serving.errors import RequestError
from pypto_serving.util import brief

_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text", "refusal")
_PREFIX = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
Item = dict[str, Any]


def read_items(given: Any) -> list[Item]:
    """Return the items of `input`, each with its type and an id."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list | None):
        refuse("input", f"is {brief(given)}, but must be a string or a list of items")
    if given and len(given) > MAX_MESSAGES:
        refuse("input", f"has {len(given)} items, but must have at most {MAX_MESSAGES}")
    return [_item(item, f"input[{i}]") for i, item in enumerate(given or ())]


def read_history(instructions: str | None, items: Sequence[Item], num_earlier: int = 0) -> list[dict[str, Any]]:
    """Return the messages for an encoder; what the assistant says in a row is one.

    The first `num_earlier` items are those of earlier responses.
    """
    history = _ItemHistory()
    if instructions:
        history.messages.append({"role": "system", "content": instructions})
    for i, item in enumerate(items, -num_earlier):
        history.add(item, f"input[{i}]" if i >= 0 else "previous_response_id")
    return history.messages


class _ItemHistory:
    """Collect messages; remember the calls so far."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}

    def add(self, item: Item, where: str) -> None:
        kind = item["type"]
        if kind == "reasoning":
            self._add_thought(item, where)
        elif kind == "function_call":
            self._add_call(item, string_in(item, "arguments", where), where)
        elif kind == "custom_tool_call":
            self._add_call(item, arguments_of(string_in(item, "input", where)), where)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._add_result(item, where)
        elif item["role"] == "assistant":
            self._assistant("content", _text(item.get("content"), f"{where}.content"))
        else:
            self._add_message(item["role"], _text(item.get("content"), f"{where}.content"))

    def _add_message(self, role: str, text: str) -> None:
        """Add what the user or the application says; at the beginning, instructions and what follows them are one."""
        if role in ("system", "developer") and [message["role"] for message in self.messages] == ["system"]:
            self.messages[0]["content"] += f"\n\n{text}"
        else:
            self.messages.append({"role": role, "content": text})

    def _assistant(self, field: str, text: str) -> dict[str, Any]:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        last = self.messages[-1]
        last[field] = "\n".join(filter(None, (last.get(field), text)))
        return last

    def _add_thought(self, item: Item, where: str) -> None:
        text = _text(item.get("content") or [], f"{where}.content", ("reasoning_text", "text"))
        text = text or _text(item.get("summary") or [], f"{where}.summary", ("summary_text",))
        if text:
            self._assistant("reasoning_content", text)

    def _add_call(self, item: Item, arguments: str, where: str) -> None:
        call_id, name = (string_in(item, field, where) for field in ("call_id", "name"))
        if item.get("namespace") is not None:
            name = full_name(string_in(item, "namespace", where), name)
        self._names[call_id] = name
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._assistant("content", "").setdefault("tool_calls", []).append(call)

    def _add_result(self, item: Item, where: str) -> None:
        call_id = string_in(item, "call_id", where)
        if call_id not in self._names:
            refuse(f"{where}.call_id", f"is {brief(call_id)}, but no earlier call has this id")
        text = _text(item.get("output"), f"{where}.output")
        self.messages.append({"role": "tool", "tool_call_id": call_id, "name": self._names[call_id], "content": text})


def _item(item: Any, where: str) -> Item:
    if not isinstance(item, dict):
        refuse(where, f"is {brief(item)}, but must be an item such as {{'role': 'user', 'content': 'Hello'}}")
    kind = item.get("type") or "message"
    if not isinstance(kind, str) or kind not in _PREFIX:
        message = f"{where} is an item of type {brief(kind)}; this server reads only {', '.join(_PREFIX)}"
        raise RequestError(message, param=where, code="unsupported_content")
    if kind == "message" and item.get("role") not in _ROLES:
        refuse(f"{where}.role", f"is {brief(item.get('role'))}, but must be one of {', '.join(_ROLES)}")
    item_id = item.get("id") or f"{_PREFIX[kind]}_{uuid.uuid4().hex}"
    if not isinstance(item_id, str):
        refuse(f"{where}.id", f"is {brief(item_id)}, but must be a string")
    return {**item, "type": kind, "id": item_id}


def _text(content: Any, where: str, kinds: Sequence[str] = _TEXTS) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        refuse(where, "is missing; send a string" if content is None else f"is {brief(content)}, not text or parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else part
        if kind not in kinds:
            message = f"{where}[{i}] is a part of type {brief(kind)}; this model reads only {', '.join(kinds)}"
            raise RequestError(message, param=f"{where}[{i}]", code="unsupported_content")
        texts.append(string_in(part, "refusal" if kind == "refusal" else "text", f"{where}[{i}]"))
    return "\n".join(texts)
