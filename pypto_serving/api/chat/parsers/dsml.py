"""Write and read DSML, DeepSeek V4's markup for tools and tool calls.

The wording is that of `encoding/encoding_dsv4.py` in the checkpoints, to the byte: models are trained on it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pypto_serving.api.chat.parsers.recovery import Markup
from pypto_serving.api.chat.parsers.tagged import Tags

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


NAME = re.compile(r'[^"<>]+')
_TAGS = Tags(
    re.compile(rf'<([^\s<>"]{{1,16}}) name="({NAME.pattern})">'),
    re.compile(rf'<([^\s<>"]{{1,18}}) name="({NAME.pattern})" string="(\w{{1,6}})">'),
    (f"{MARK}invoke", f"{MARK}parameter"),
    (PARAMETER_END, INVOKE_END, CALLS_END),
    starts=(f"<{MARK}invoke", CALLS_START),
    values_have_lines=False,
)
MARKUP = Markup(
    _TAGS.read, starts=(CALLS_START,), loose_heads=(f"<{MARK}invoke",), ends=(INVOKE_END, CALLS_END), opener="<"
)
