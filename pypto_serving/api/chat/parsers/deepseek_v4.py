"""Read the calls of DeepSeek V4: blocks in DSML."""

from __future__ import annotations

import re

from pypto_serving.api.chat.dsml import CALLS_END, CALLS_START, INVOKE_END, MARK, PARAMETER_END, to_json
from pypto_serving.api.chat.parsers.json_calls import end_of_value, is_json, read_head
from pypto_serving.api.chat.parsers.scanner import OutputScanner, Steps, Tools, find, meets, past_space, seek

MAX_HEAD = 512
"""Characters of a tag with a name."""
NAME = re.compile(r'[^"<>]+')
_INVOKE = re.compile(rf'<{MARK}invoke name="({NAME.pattern})">')
_PARAMETER = re.compile(rf'<{MARK}parameter name="({NAME.pattern})" string="(true|false)">')
STARTS = (CALLS_START,)
_SOUGHT = (f"\n\n{CALLS_START}", *STARTS)
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
