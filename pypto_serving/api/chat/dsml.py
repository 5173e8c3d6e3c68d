"""Write and read DSML, DeepSeek V4's markup for tools and tool calls.

The wording is that of `encoding/encoding_dsv4.py` in the checkpoints, to the byte: models are trained on it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pypto_serving.api.chat.output import ToolCall

MARK = "｜DSML｜"
CALLS_START = f"<{MARK}tool_calls>"
CALLS_END = f"</{MARK}tool_calls>"
_INVOKE_END = f"</{MARK}invoke>"
_PARAMETER_END = f"</{MARK}parameter>"

_TOOLS_BEFORE = f"""## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"{CALLS_START}" block like the following:

{CALLS_START}
<{MARK}invoke name="$TOOL_NAME">
<{MARK}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE{_PARAMETER_END}
...
{_INVOKE_END}
<{MARK}invoke name="$TOOL_NAME2">
...
{_INVOKE_END}
{CALLS_END}

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside \
<think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

"""
_TOOLS_AFTER = """

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""

_PARAMETER = re.compile(
    rf'<{MARK}parameter name="([^"]*)" string="(true|false)">(.*?){_PARAMETER_END}',
    re.DOTALL,
)
_INVOKE = re.compile(
    rf'\s*<{MARK}invoke name="([^"]*)">\s*+'
    rf'((?:<{MARK}parameter name="[^"]*" string="(?:true|false)">(?>.*?{_PARAMETER_END})\s*+)*+)'
    rf"{_INVOKE_END}",
    re.DOTALL,
)
"""Possessive quantifiers, so that no text makes it backtrack."""
_BLOCK_END = re.compile(rf"\s*{CALLS_END}")
_ANY_END = re.compile(rf"{_INVOKE_END}|{CALLS_END}")
_OVERLAP = max(len(_INVOKE_END), len(CALLS_END)) - 1


def to_json(value: Any) -> str:
    """Write JSON like the encoding: spaces after separators, Unicode not escaped."""
    return json.dumps(value, ensure_ascii=False)


def write_tools(functions: Sequence[Mapping[str, Any]]) -> str:
    """Write the block that describes `functions`, which are OpenAI's function objects."""
    return _TOOLS_BEFORE + "\n".join(map(to_json, functions)) + _TOOLS_AFTER


def write_calls(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Write the block of calls; each is a tool's name and its arguments."""
    return f"{CALLS_START}\n" + "".join(f"{_write_call(*call)}\n" for call in calls) + CALLS_END


def _write_call(name: str, arguments: Mapping[str, Any]) -> str:
    parameters = "\n".join(_write_parameter(key, value) for key, value in arguments.items())
    return f'<{MARK}invoke name="{name}">\n{parameters}\n{_INVOKE_END}'


def _write_parameter(name: str, value: Any) -> str:
    kind, text = ("true", value) if isinstance(value, str) else ("false", to_json(value))
    return f'<{MARK}parameter name="{name}" string="{kind}">{text}{_PARAMETER_END}'


class BlockReader:
    """Read the calls after a CALLS_START from text that comes in pieces. Owned by one parser.

    Tags are read in order, so a value may contain end tags of its parents. `rest` is the text not read yet.
    """

    def __init__(self) -> None:
        self.rest = ""
        self.ended = False
        self._searched = 0

    def push(self, text: str) -> list[ToolCall]:
        """Add text; return the calls that it completes. Once the block has `ended`, all text goes to `rest`."""
        self.rest += text
        calls = []
        while not self.ended and (end := _ANY_END.search(self.rest, self._searched)):
            if call := _INVOKE.match(self.rest):
                calls.append(ToolCall(call[1], _read_arguments(call[2])))
                self._drop(call.end())
            elif block := _BLOCK_END.match(self.rest):
                self.ended = True
                self._drop(block.end())
            else:
                self._searched = end.end()
        if not self.ended:
            self._searched = max(self._searched, len(self.rest) - _OVERLAP)
        return calls

    def _drop(self, count: int) -> None:
        self.rest, self._searched = self.rest[count:], 0


def _read_arguments(parameters: str) -> str:
    """Make the JSON object of a call's parameters; of a repeated one the last counts."""
    values = {}
    for name, is_string, value in _PARAMETER.findall(parameters):
        values[name] = to_json(value) if is_string == "true" or not _is_json(value) else value
    return "{" + ", ".join(f"{to_json(name)}: {value}" for name, value in values.items()) + "}"


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
