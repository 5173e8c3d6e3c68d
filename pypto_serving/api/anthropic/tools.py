"""Read Anthropic's tools: those that the model may call, and whether it has to. Raises RequestError."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pypto_serving.api.chat.tools import MAX_DEPTH, MAX_TOOLS, ToolUse, check_names, is_shallow, refuse
from pypto_serving.util import brief

CHOICES = ("auto", "any", "tool", "none")


def read_tool_use(tools: Any, tool_choice: Any) -> ToolUse:
    """Read `tools` and `tool_choice`."""
    functions = _functions(tools)
    names = check_names(functions, "tools", "name")
    choice = {"type": "auto"} if tool_choice is None else tool_choice
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind not in CHOICES:
        refuse("tool_choice", f"is {brief(choice)}, but must be an object whose type is one of {', '.join(CHOICES)}")
    single = choice.get("disable_parallel_tool_use")
    if not isinstance(single, bool | None):
        refuse("tool_choice.disable_parallel_tool_use", f"is {brief(single)}, but must be true or false")
    if kind == "none":
        return ToolUse()
    if kind == "auto":
        return ToolUse(functions, (), not single)
    if not functions:
        refuse("tool_choice", "needs a call, but there are no tools; send tools, or set its type to 'auto'")
    if kind == "any":
        return ToolUse(functions, tuple(names), not single)
    name = choice.get("name")
    if name not in names:
        refuse("tool_choice.name", f"is {brief(name)}, but the names in tools are {brief(names)}")
    return ToolUse(functions, (name,), False)


def _functions(tools: Any) -> list[Mapping[str, Any]]:
    """Return OpenAI's function objects, which templates take."""
    if not isinstance(tools, list | None):
        refuse("tools", f"is {brief(tools)}, but must be a list of {{'name': ..., 'input_schema': {{...}}}}")
    if tools and len(tools) > MAX_TOOLS:
        refuse("tools", f"has {len(tools)} tools, but must have at most {MAX_TOOLS}")
    return [_function(tool, f"tools[{i}]") for i, tool in enumerate(tools or ())]


def _function(tool: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(tool, Mapping):
        refuse(where, f"is {brief(tool)}, but must be an object with name and input_schema")
    if tool.get("type") not in (None, "custom"):
        refuse(f"{where}.type", f"is {brief(tool['type'])}, but this server has no tools of its own; describe the tool")
    name, description, schema, strict = (tool.get(key) for key in ("name", "description", "input_schema", "strict"))
    if not isinstance(name, str):
        refuse(f"{where}.name", f"is {brief(name)}, but must be a string")
    if not isinstance(description, str | None):
        refuse(f"{where}.description", f"is {brief(description)}, but must be a string")
    if not isinstance(schema, dict):
        refuse(f"{where}.input_schema", f"is {brief(schema)}, but must be a JSON schema, which is an object")
    if not is_shallow(schema, MAX_DEPTH):
        refuse(f"{where}.input_schema", f"has more than {MAX_DEPTH} levels; nest less")
    if not isinstance(strict, bool | None):
        refuse(f"{where}.strict", f"is {brief(strict)}, but must be true or false")
    function = {"name": name, "description": description, "parameters": schema, "strict": strict}
    return {key: value for key, value in function.items() if value is not None}
