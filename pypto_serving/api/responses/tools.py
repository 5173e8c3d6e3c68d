"""Read the tools of a response: functions, as those of chats without a level, and custom tools. Raises RequestError.

A custom tool is a function for the model, whose one argument is the `input`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def is_hosted(tool: Any) -> bool:
    """Return whether this server leaves a tool out, so that the model never calls it."""
    return isinstance(tool, Mapping) and isinstance(kind := tool.get("type"), str) and kind in HOSTED


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
    nested = None
    if tools is not None:
        nested = [_nested(tool, f"tools[{i}]") for i, tool in enumerate(tools) if not is_hosted(tool)]
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
        message = str(error).replace(error.param or "\0", param)
        raise RequestError(message, param=param, code=error.code) from None


def _nested(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        refuse(where, f"is {brief(tool)}, but must be {{'type': 'function', 'name': ...}}")
    if tool.get("type") == "custom":
        return {"type": "function", "function": _function_of(tool, where)}
    if tool.get("type") != "function":
        refuse(f"{where}.type", f"is {brief(tool.get('type'))}, but must be 'function' or 'custom'")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


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
