"""Convert Anthropic's messages and tools for chat encoders. Raises RequestError that names the field at fault."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pypto_serving.api.chat.leaving_out import LeftOut, newest_words
from pypto_serving.api.chat.tools import (
    MAX_DEPTH,
    ToolUse,
    check_function,
    check_names,
    choose_tools,
    is_shallow,
    list_of_tools,
    object_in,
    refuse,
    string_in,
    with_joined_texts,
)
from pypto_serving.errors import RequestError
from pypto_serving.util import brief

BILLING = "x-anthropic-billing-header:"
"""Begins a system block that Claude Code changes with every request. It is dropped: it would end the shared prefix."""
ERROR = "Error: "
"""Prefix of the result of a failed tool, since templates have no way to mark errors."""
Block = Mapping[str, Any]


def read_history(system: Any, messages: Sequence[Any], left_out: LeftOut) -> list[dict[str, Any]]:
    """Return the messages for an encoder, the system message first.

    Blocks of text are joined by line breaks. Results of tools become messages of their own. Consecutive messages of
    one role become one. Images are refused in what a person has just written; elsewhere a text takes their
    place. What hosted tools left behind is dropped.
    """
    roles = [str(message.get("role")) if isinstance(message, Mapping) else "" for message in messages]
    history = _MessageHistory(left_out, newest_words(roles))
    words = [text for text in _texts(system or "", "system") if text and not text.startswith(BILLING)]
    if words:
        history.add("system", "\n".join(words))
    for i, message in enumerate(messages):
        history.read(message, i)
    return history.finish()


class _MessageHistory:
    """Collect messages; remember the calls so far. Images in the message at `newest` are refused."""

    def __init__(self, left_out: LeftOut, newest: int) -> None:
        self._messages: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}
        self._left_out = left_out
        self._newest = newest

    def read(self, message: Any, place_in_list: int) -> None:
        where = f"messages[{place_in_list}]"
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ("user", "assistant", "system"):
            refuse(f"{where}.role", f"is {brief(role)}, but must be 'user', 'assistant' or 'system'")
        content, place = message.get("content"), f"{where}.content"
        if content is None:
            raise RequestError(f"{place} is missing; send a string or blocks", param=place, code="missing_field")
        if role == "system":
            self.add(role, "\n".join(_texts(content, place)))
        elif role == "user":
            self._read_user(content, place, None if place_in_list == self._newest else self._left_out)
        else:
            self._read_assistant(content, place)

    def finish(self) -> list[dict[str, Any]]:
        """Return the messages."""
        return [with_joined_texts(message) for message in self._messages]

    def add(self, role: str, content: str) -> dict[str, Any]:
        """Append text to the last message if it has the same role, else add a message; return it."""
        if not self._messages or self._messages[-1]["role"] != role:
            self._messages.append({"role": role, "content": []})
        message = self._messages[-1]
        message["content"].append(content)
        return message

    def _read_user(self, content: Any, where: str, left_out: LeftOut | None) -> None:
        """Read the user's blocks. A document beside results may be left out: Claude Code sends PDFs that it read so."""
        blocks = list(_blocks(content, where))
        beside_results = any(block["type"] == "tool_result" for block, _ in blocks)
        for block, place in blocks:
            if block["type"] == "tool_result":
                self._add_result(block, place)
            elif _HOSTED.search(block["type"]):
                self._left_out.add(block["type"])
            else:
                is_read = beside_results and block["type"] == "document"
                text = _text(block, place, "text and tool_result", self._left_out if is_read else left_out)
                self.add("user", text)

    def _add_result(self, block: Block, where: str) -> None:
        call_id = string_in(block, "tool_use_id", where)
        if call_id not in self._names:
            refuse(f"{where}.tool_use_id", f"is {brief(call_id)}, but no earlier tool_use has this id")
        failed = block.get("is_error")
        if not isinstance(failed, bool | None):
            refuse(f"{where}.is_error", f"is {brief(failed)}, but must be true or false")
        text = "\n".join(_texts(block.get("content") or "", f"{where}.content", self._left_out))
        message = {"role": "tool", "tool_call_id": call_id, "name": self._names[call_id]}
        self._messages.append({**message, "content": [ERROR + text if failed else text]})

    def _read_assistant(self, content: Any, where: str) -> None:
        texts, thoughts, calls = [], [], []
        for block, place in _blocks(content, where):
            if block["type"] == "thinking":
                thoughts.append(string_in(block, "thinking", place))
            elif block["type"] == "tool_use":
                calls.append(self._call(block, place))
            elif _HOSTED.search(block["type"]):
                self._left_out.add(block["type"])
            elif block["type"] != "redacted_thinking":
                texts.append(_text(block, place, "text, thinking and tool_use", self._left_out))
        message = self.add("assistant", "\n".join(texts))
        if calls:
            message.setdefault("tool_calls", []).extend(calls)
        if thoughts:
            message.setdefault("reasoning_content", []).extend(thoughts)

    def _call(self, block: Block, where: str) -> dict[str, Any]:
        call_id, name, given = string_in(block, "id", where), string_in(block, "name", where), block.get("input")
        if isinstance(given, str):
            given = object_in(given)  # a client could not read what the model wrote
        elif not isinstance(given, dict):
            refuse(f"{where}.input", f"is {brief(given)}, but must be an object")
        if not is_shallow(given, MAX_DEPTH):
            refuse(f"{where}.input", f"has more than {MAX_DEPTH} levels; nest less")
        self._names[call_id] = name
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}}


def _blocks(content: Any, where: str) -> Iterator[tuple[Block, str]]:
    """Iterate over the blocks of a message, each with its field; a string is one block of text."""
    if isinstance(content, str):
        yield {"type": "text", "text": content}, where
        return
    if not isinstance(content, list):
        refuse(where, f"is {brief(content)}, but must be a string or a list of blocks")
    for i, block in enumerate(content):
        place = f"{where}[{i}]"
        if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
            refuse(place, f"is {brief(block)}, but must be a block such as {{'type': 'text', 'text': 'Hello'}}")
        yield block, place


_HOSTED = re.compile(r"\w_tool_result$|^(server|mcp)_tool_use$|^mcp_tool_listing$|^container_upload$|^compaction$")
"""Types of blocks that come of tools that Anthropic runs, and of its bookkeeping."""


def _texts(content: Any, where: str, left_out: LeftOut | None = None) -> list[str]:
    """Return the texts of a content; see `_text`."""
    return [_text(block, place, "text", left_out) for block, place in _blocks(content, where)]


def _text(block: Block, where: str, allowed: str, left_out: LeftOut | None) -> str:
    """Return the text of a block, of a document that is text, of a search result, or of a reference to a tool.

    In place of others stands what `left_out` says; without it they are refused.
    """
    kind, source = block["type"], block.get("source")
    if kind == "text":
        return string_in(block, "text", where)
    if kind == "tool_reference":
        return f"The tool {string_in(block, 'tool_name', where)} can be called now."
    if kind == "search_result":
        return _titled(block, source, block.get("content"), f"{where}.content", left_out)
    if kind == "document" and isinstance(source, Mapping) and source.get("type") in ("text", "content"):
        field = "data" if source["type"] == "text" else "content"
        return _titled(block, block.get("context"), source.get(field), f"{where}.source.{field}", left_out)
    if left_out is None:
        message = f"{where} is a block of type {brief(block['type'])}; here this model reads only {allowed}"
        raise RequestError(message, param=where, code="unsupported_content")
    return left_out.stand_in(kind)


def _titled(block: Block, below: Any, content: Any, where: str, left_out: LeftOut | None) -> str:
    lines = [line for line in (block.get("title"), below) if isinstance(line, str)]
    return "\n".join(lines + ([] if content is None else _texts(content, where, left_out)))


_MODE_OF = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
"""OpenAI's modes, by the types of tool choices."""


def read_tool_use(tools: Any, tool_choice: Any, left_out: LeftOut) -> ToolUse:
    """Read `tools` and `tool_choice`. Tools that Anthropic runs, or that only its models know, are left out."""
    listed = list_of_tools(tools, "tools", "{'name': ..., 'input_schema': {...}}")
    listed, tool_choice = left_out.tools(listed, tool_choice, [tool for tool in listed if _is_hosted(tool)])
    functions = [_function(tool, f"tools[{i}]") for i, tool in enumerate(listed)]
    names = check_names(functions, "tools", "name")
    choice = {"type": "auto"} if tool_choice is None else tool_choice
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if not isinstance(kind, str) or kind not in _MODE_OF:
        refuse("tool_choice", f"is {brief(choice)}, but must be an object whose type is one of {', '.join(_MODE_OF)}")
    single = choice.get("disable_parallel_tool_use")
    if not isinstance(single, bool | None):
        refuse("tool_choice.disable_parallel_tool_use", f"is {brief(single)}, but must be true or false")
    named = {"tool_choice.name": choice.get("name")} if kind == "tool" else {}
    return choose_tools(functions, names, _MODE_OF[kind], named, not single and kind != "tool")


def _is_hosted(tool: Any) -> bool:
    """Return whether a tool is described by its type alone."""
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    return isinstance(kind, str) and kind != "custom" and "input_schema" not in tool


def _function(tool: Any, where: str) -> Mapping[str, Any]:
    """Convert a tool to OpenAI's function object, which templates take."""
    if not isinstance(tool, Mapping):
        refuse(where, f"is {brief(tool)}, but must be an object with name and input_schema")
    if not isinstance(tool.get("type"), str | None):
        refuse(f"{where}.type", f"is {brief(tool['type'])}, but must be a string")
    if not isinstance(tool.get("name"), str):
        refuse(f"{where}.name", f"is {brief(tool.get('name'))}, but must be a string")
    check_function(tool, where, "input_schema", needs_schema=True)
    function = {name: tool.get(name) for name in ("name", "description", "strict")}
    function["parameters"] = tool["input_schema"]
    return {key: value for key, value in function.items() if value is not None}
