"""Convert items and tools for chat encoders. Raises RequestError that names the field at fault."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from pypto_serving.api.chat.leaving_out import LeftOut, is_hosted, newest_words
from pypto_serving.api.chat.tools import ToolUse, read_tool_use, refuse, string_in, text_of, with_joined_texts
from pypto_serving.api.common.body import MAX_MESSAGES
from pypto_serving.errors import RequestError
from pypto_serving.util import brief

MAX_RESPONSE_BYTES = 4 << 20
"""Limit of a kept response's conversation, and of a body that refers to one, since the event loop parses both."""
_PLACE = re.compile(r"^tools\[(\d+)\]")
_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


class Called(NamedTuple):
    """The form in which calls of a tool are sent to the client."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


def full_name(namespace: str | None, name: str) -> str:
    """Return the name of a tool in the prompt."""
    if namespace is None:
        return name
    return namespace + ("" if namespace.endswith("__") else "__") + name


def callable_tools(tools: Sequence[Any]) -> dict[str, Called]:
    """Return, by a tool's name in the prompt, the form in which its calls are sent to the client."""
    found = [Called(tool["name"], namespace, tool["type"] == "custom") for _, namespace, tool in _offered(tools)]
    return {full_name(called.namespace, called.name): called for called in found}


def _offered(tools: Sequence[Any]) -> Iterator[tuple[str, str | None, Any]]:
    """Yield field, namespace and tool for each tool that the model may call."""
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if is_hosted(tool):
            continue
        if not isinstance(tool, Mapping) or tool.get("type") != "namespace":
            yield where, None, tool
            continue
        namespace, inner = tool.get("name"), tool.get("tools")
        if not isinstance(namespace, str) or not isinstance(inner, list):
            refuse(where, f"is {brief(tool)}, but a namespace must have a name and a list of tools")
        for j, one in enumerate(inner):
            yield f"{where}.tools[{j}]", namespace, one


def arguments_of(text: str) -> str:
    """Return the arguments of the function that replaces a custom tool, as JSON with the input `text`."""
    return msgspec.json.encode({"input": text}).decode()


def input_of(arguments: str) -> str:
    """Return the input of a custom tool: the function's argument, or the whole text if it cannot be parsed."""
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    given = found.get("input") if isinstance(found, dict) else None
    return given if isinstance(given, str) else arguments


def read_response_tools(tools: Sequence[Any] | None, choice: Any, parallel: bool | None, left_out: LeftOut) -> ToolUse:
    """Read `tools` and `tool_choice`; errors name the fields as chats have them. Hosted tools are left out."""
    hosted = [tool for tool in tools or () if is_hosted(tool)]
    _, choice = left_out.tools(tools, choice, hosted)
    offered = list(_offered(tools or ()))
    nested = [_nested(tool, where, namespace) for where, namespace, tool in offered]
    if isinstance(choice, Mapping):
        if choice.get("type") in ("function", "custom"):
            choice = _nested({"type": "function", "name": choice.get("name")}, "tool_choice")
        elif choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
            listed = [
                _nested(one, f"tool_choice.tools[{i}]") for i, one in enumerate(choice["tools"]) if not is_hosted(one)
            ]
            choice = {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": listed}}
            choice = choice if listed or not hosted else "none"
    try:
        return read_tool_use(nested, choice, parallel)
    except RequestError as error:
        param = (error.param or "").replace(".function", "").replace("choice.allowed_tools", "choice")
        param = _PLACE.sub(lambda found: offered[int(found[1])][0], param)
        message = str(error).replace(error.param or "\0", param)
        raise RequestError(message, param=param, code=error.code) from None


def _nested(tool: Any, where: str, namespace: str | None = None) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        refuse(where, f"is {brief(tool)}, but must be {{'type': 'function', 'name': ...}}")
    kind, name = tool.get("type"), tool.get("name")
    if kind not in ("function", "custom"):
        refuse(f"{where}.type", f"is {brief(kind)}, but must be 'function', 'custom' or, around others, 'namespace'")
    function = _function_of(tool, where) if kind == "custom" else {key: tool[key] for key in tool if key != "type"}
    known = full_name(namespace, name) if isinstance(name, str) else name
    return {"type": "function", "function": {**function, "name": known}}


def _function_of(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the function that replaces a custom tool; its description contains the grammar of the input."""
    said, form = [tool.get("description")], tool.get("format") or {"type": "text"}
    kind = form.get("type") if isinstance(form, Mapping) else None
    if kind == "grammar":
        syntax, definition = form.get("syntax"), form.get("definition")
        if syntax not in ("lark", "regex") or not isinstance(definition, str):
            refuse(f"{where}.format", "must have a syntax of 'lark' or 'regex', and a definition")
        said.append(f"The input matches this grammar ({syntax}):\n{definition}")
    elif kind != "text":
        refuse(f"{where}.format", f"is {brief(form)}, but its type must be 'text' or 'grammar'")
    if any(not isinstance(one, str) for one in said if one is not None):
        refuse(f"{where}.description", f"is {brief(said[0])}, but must be a string")
    function = {"name": tool.get("name"), "parameters": _INPUT}
    return function | ({"description": text} if (text := "\n\n".join(filter(None, said))) else {})


_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_PREFIX = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
Item = dict[str, Any]


def is_reference(kind: Any, role: Any) -> bool:
    """Return whether an item of this type and role refers to one that is kept, by its id."""
    return kind == "item_reference" or (kind is None and role is None)


def read_items(given: Any, left_out: LeftOut, referred: Mapping[str, Item] | None) -> list[Item]:
    """Return the items of `input`, each with its type and an id. Those of hosted tools are left out.

    `referred` are kept items to which others refer; None if the body is too long for references. Raises
    RequestError for a reference to any other.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list | None):
        refuse("input", f"is {brief(given)}, but must be a string or a list of items")
    if given and len(given) > MAX_MESSAGES:
        refuse("input", f"has {len(given)} items, but must have at most {MAX_MESSAGES}")
    kept = []
    for i, item in enumerate(given or ()):
        kind = item.get("type") if isinstance(item, dict) else None
        if isinstance(item, dict) and is_reference(kind, item.get("role")) and isinstance(item.get("id"), str):
            if referred is None:
                most = f"only allowed in bodies of at most {MAX_RESPONSE_BYTES >> 20} MiB; send the item instead"
                refuse(f"input[{i}].id", f"refers to an item, which is {most}")
            if item["id"] not in referred:
                why = "it was not stored, was deleted, or had to make room"
                message = f"input[{i}] refers to the item {item['id'][:128]!r}, but there is none: {why}"
                raise RequestError(message, param=f"input[{i}].id", code="item_not_found", status=404)
            kept.append(referred[item["id"]])
        elif isinstance(kind, str) and kind not in _PREFIX and _HOSTED_ITEM.search(kind):
            left_out.add(kind)
        else:
            kept.append(_item(item, f"input[{i}]"))
    return kept


_HOSTED_ITEM = re.compile(r"_(call|output)$|^mcp_|^compaction|^(additional_tools|configuration_update|program)$")
"""Types of items that hosted tools leave in a history, and OpenAI's bookkeeping."""


def read_history(
    instructions: str | None, items: Sequence[Item], left_out: LeftOut, num_earlier: int = 0
) -> list[dict[str, Any]]:
    """Return the messages for an encoder; consecutive items of the assistant make one.

    The first `num_earlier` items are those of earlier responses. Images are refused in what a person has just written;
    elsewhere a text takes their place.
    """
    history = _ItemHistory(left_out)
    newest = newest_words([_speaker(item) for item in items]) - num_earlier
    if instructions:
        history.add_message("system", instructions)
    for i, item in enumerate(items, -num_earlier):
        history.add(item, f"input[{i}]" if i >= 0 else "previous_response_id", i == newest)
    return history.finish()


def _speaker(item: Item) -> str:
    if item["type"] == "message":
        return str(item["role"])
    return "tool" if item["type"].endswith("_output") else "assistant"


class _ItemHistory:
    """Collects messages. Remembers the calls so far."""

    def __init__(self, left_out: LeftOut) -> None:
        self._messages: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}
        self._left_out = left_out

    def add(self, item: Item, where: str, is_newest: bool) -> None:
        """Add an item; `is_newest` if a person has just written it."""
        kind = item["type"]
        if kind == "reasoning":
            self._add_thought(item, where)
        elif kind == "function_call":
            self._add_call(item, string_in(item, "arguments", where), where)
        elif kind == "custom_tool_call":
            self._add_call(item, arguments_of(string_in(item, "input", where)), where)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._add_result(item, where)
        else:
            left_out = None if is_newest or item["role"] in ("system", "developer") else self._left_out
            text = text_of(item.get("content"), f"{where}.content", _TEXTS, left_out)
            if item["role"] == "assistant":
                self._assistant("content", text)
            else:
                self.add_message(item["role"], text)

    def finish(self) -> list[dict[str, Any]]:
        """Return the messages."""
        return [
            with_joined_texts(message, "\n\n" if message["role"] == "system" else "\n") for message in self._messages
        ]

    def add_message(self, role: str, text: str) -> None:
        """Add a message. Merge system and developer messages right after a leading system message into that one."""
        leads = len(self._messages) == 1 and self._messages[0]["role"] == "system"
        if role in ("system", "developer") and leads:
            self._messages[0]["content"].append(text)
        else:
            self._messages.append({"role": role, "content": [text]})

    def _assistant(self, field: str, text: str) -> dict[str, Any]:
        if not self._messages or self._messages[-1]["role"] != "assistant":
            self._messages.append({"role": "assistant", "content": []})
        last = self._messages[-1]
        last.setdefault(field, []).append(text)
        return last

    def _add_thought(self, item: Item, where: str) -> None:
        text = text_of(item.get("content") or [], f"{where}.content", {"reasoning_text": "text", "text": "text"})
        text = text or text_of(item.get("summary") or [], f"{where}.summary", {"summary_text": "text"})
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
        text = text_of(item.get("output"), f"{where}.output", _TEXTS, self._left_out)
        told = {"role": "tool", "tool_call_id": call_id, "name": self._names[call_id]}
        self._messages.append({**told, "content": [text]})


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
