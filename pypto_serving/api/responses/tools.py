"""Read the tools of a response: functions, as those of chats without a level, and custom tools. Raises RequestError.

A custom tool is a function for the model, whose one argument is the `input`. A tool of a namespace has its name before
its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from pypto_serving.api.chat.tools import ToolUse, read_tool_use, refuse
from pypto_serving.errors import RequestError
from pypto_serving.util import brief

HOSTED = frozenset(
    {
        "apply_patch", "code_interpreter", "computer", "computer_use_preview", "file_search", "image_generation",
        "local_shell", "mcp", "shell", "tool_search", "web_search", "web_search_2025_08_26", "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)  # fmt: skip
"""Types of tools that OpenAI or its clients run, and that its models know without a description."""
_PLACE = re.compile(r"^tools\[(\d+)\]")
_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


class Called(NamedTuple):
    """What a call of a tool tells the client."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


def is_hosted(tool: Any) -> bool:
    """Return whether this server leaves a tool out, so that the model never calls it."""
    return isinstance(tool, Mapping) and isinstance(kind := tool.get("type"), str) and kind in HOSTED


def full_name(namespace: str | None, name: str) -> str:
    """Return the name that the model knows a tool by."""
    if namespace is None:
        return name
    return namespace + ("" if namespace.endswith("__") else "__") + name


def callable_tools(tools: Sequence[Any]) -> dict[str, Called]:
    """Return what calls tell of tools that were read, by the names that the model knows."""
    found = [Called(tool["name"], namespace, tool["type"] == "custom") for _, namespace, tool in _offered(tools)]
    return {full_name(called.namespace, called.name): called for called in found}


def _offered(tools: Sequence[Any]) -> Iterator[tuple[str, str | None, Any]]:
    """Yield the tools that the model may call, each with its place and its namespace."""
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
    """Return the arguments of the function that stands for a custom tool."""
    return msgspec.json.encode({"input": text}).decode()


def input_of(arguments: str) -> str:
    """Return what a model gave a custom tool: the argument, or else all that it wrote."""
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    given = found.get("input") if isinstance(found, dict) else None
    return given if isinstance(given, str) else arguments


def read_response_tools(tools: Sequence[Any] | None, choice: Any, parallel: bool | None) -> ToolUse:
    """Read `tools` and `tool_choice`; errors name the fields as chats have them."""
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
    """Return the function that stands for a custom tool; its description has the grammar of the input."""
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
