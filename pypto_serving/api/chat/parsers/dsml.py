"""Write and read DSML, DeepSeek V4's markup for tools and tool calls.

The wording is that of `encoding/encoding_dsv4.py` in the checkpoints, to the byte: models are trained on it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pypto_serving.api.chat.parsers.json_calls import end_of_value, is_json, read_head
from pypto_serving.api.chat.parsers.scanner import OutputScanner, Steps, Tools, find, meets, past_space, seek

MARK = "｜DSML｜"
CALLS_START = f"<{MARK}tool_calls>"
CALLS_END = f"</{MARK}tool_calls>"
INVOKE_END = f"</{MARK}invoke>"
PARAMETER_END = f"</{MARK}parameter>"

_TOOLS_BEFORE = f"""## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"{CALLS_START}" block like the following:

{CALLS_START}
<{MARK}invoke name="$TOOL_NAME">
<{MARK}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE{PARAMETER_END}
...
{INVOKE_END}
<{MARK}invoke name="$TOOL_NAME2">
...
{INVOKE_END}
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
    return f'<{MARK}invoke name="{name}">\n{parameters}\n{INVOKE_END}'


def _write_parameter(name: str, value: Any) -> str:
    kind, text = ("true", value) if isinstance(value, str) else ("false", to_json(value))
    return f'<{MARK}parameter name="{name}" string="{kind}">{text}{PARAMETER_END}'


MAX_HEAD = 512
"""Characters of a tag with a name."""
NAME = re.compile(r'[^"<>]+')
_INVOKE = re.compile(rf'<{MARK}invoke name="({NAME.pattern})">')
_PARAMETER = re.compile(rf'<{MARK}parameter name="({NAME.pattern})" string="(true|false)">')
_SOUGHT = (f"\n\n{CALLS_START}", CALLS_START)
"""A gap before a block of calls belongs to it."""


def read(scanner: OutputScanner, tools: Tools) -> Steps[None]:
    """Read content and blocks of calls.

    Tags are read in order, so a value may contain end tags of its parents. Of a block that is cut or malformed,
    everything from the first unreadable call on is content.
    """
    while mark := (yield from seek(scanner, _SOUGHT, scanner.say)):
        if not (yield from _read_block(scanner, len(mark))):
            return


def _read_block(scanner: OutputScanner, at: int) -> Steps[bool]:
    """Read the calls at `at` up to the end of their block; tell whether there was an end."""
    while call := (yield from _read_call(scanner, at)):
        name, arguments, end = call
        scanner.call(name)
        scanner.arguments(arguments)
        scanner.drop(end)
        at = 0
    at_end = yield from past_space(scanner, at)
    if (yield from meets(scanner, at_end, CALLS_END)):
        scanner.drop(at_end + len(CALLS_END))
        return True
    if at == 0 and at_end == len(scanner.text):
        scanner.drop(at_end)
    return False


def _read_call(scanner: OutputScanner, at: int) -> Steps[tuple[str, str, int] | None]:
    """Return name, arguments and end of the call at `at`; None if there is none. Consume nothing.

    Of a repeated parameter the last counts.
    """
    at = yield from past_space(scanner, at)
    call = yield from read_head(scanner, at, _INVOKE, ">", MAX_HEAD)
    if call is None:
        return None
    at, values = call.end(), {}
    while True:
        at = yield from past_space(scanner, at)
        head = yield from read_head(scanner, at, _PARAMETER, ">", MAX_HEAD)
        if head is None:
            break
        begin, is_text = head.end(), head[2] == "true"
        if is_text:
            end = yield from find(scanner, PARAMETER_END, begin)
        else:
            end = yield from end_of_value(scanner, PARAMETER_END, begin, '{["')
        if end < 0:
            return None
        value = scanner.text[begin:end]
        values[head[1]] = to_json(value) if is_text or not is_json(value) else value
        at = end + len(PARAMETER_END)
    if not (yield from meets(scanner, at, INVOKE_END)):
        return None
    arguments = ", ".join(f"{to_json(name)}: {value}" for name, value in values.items())
    return call[1], f"{{{arguments}}}", at + len(INVOKE_END)
