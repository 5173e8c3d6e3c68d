"""Read the tools of a response, which are those of chats without a level. Raises RequestError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pypto_serving.api.chat.tools import ToolUse, read_tool_use, refuse
from pypto_serving.errors import RequestError
from pypto_serving.util import brief


def read_response_tools(tools: Sequence[Any] | None, choice: Any, parallel: bool | None) -> ToolUse:
    """Read `tools` and `tool_choice`; errors name the fields as chats have them."""
    nested = None if tools is None else [_nested(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    if isinstance(choice, Mapping):
        if choice.get("type") == "function":
            choice = _nested(choice, "tool_choice")
        elif choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
            listed = [_nested(one, f"tool_choice.tools[{i}]") for i, one in enumerate(choice["tools"])]
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
    if tool.get("type") != "function":
        refuse(
            f"{where}.type", f"is {brief(tool.get('type'))}, but this server has no tools of its own; send functions"
        )
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
