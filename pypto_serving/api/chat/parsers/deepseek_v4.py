"""Read the calls of DeepSeek V4: blocks in DSML."""

from __future__ import annotations

import json
import re

from pypto_serving.api.chat.dsml import CALLS_END, CALLS_START, INVOKE_END, MARK, PARAMETER_END, to_json
from pypto_serving.api.chat.parsers.tape import Steps, Tape, Tools, seek

_PARAMETER = re.compile(
    rf'<{MARK}parameter name="([^"]*)" string="(true|false)">(.*?){PARAMETER_END}',
    re.DOTALL,
)
_INVOKE = re.compile(
    rf'\s*<{MARK}invoke name="([^"]*)">\s*+'
    rf'((?:<{MARK}parameter name="[^"]*" string="(?:true|false)">(?>.*?{PARAMETER_END})\s*+)*+)'
    rf"{INVOKE_END}",
    re.DOTALL,
)
"""Possessive quantifiers, so that no text makes it backtrack."""
_BLOCK_END = re.compile(rf"\s*{CALLS_END}")
_ANY_END = re.compile(rf"{INVOKE_END}|{CALLS_END}")
_STARTS = (f"\n\n{CALLS_START}", CALLS_START)
"""A gap before a block of calls belongs to it."""
_OVERLAP = max(len(INVOKE_END), len(CALLS_END)) - 1


def read(tape: Tape, tools: Tools) -> Steps[None]:
    """Read content and blocks of calls.

    Tags are read in order, so a value may contain end tags of its parents. Of a block that is cut or malformed,
    everything from the first unreadable call on is content.
    """
    while mark := (yield from seek(tape, _STARTS, tape.say)):
        if not (yield from _read_block(tape, len(mark))):
            return


def _read_block(tape: Tape, at: int) -> Steps[bool]:
    """Read the calls at `at` up to the end of their block; tell whether the output has gone so far."""
    searched = at
    while True:
        if (end := _ANY_END.search(tape.text, searched)) is None:
            if tape.ended:
                tape.drop(0 if at or tape.text.strip() else len(tape.text))
                return False
            searched = max(searched, len(tape.text) - _OVERLAP)
            yield
        elif call := _INVOKE.match(tape.text, at):
            tape.call(call[1])
            tape.arguments(_read_arguments(call[2]))
            tape.drop(call.end())
            at = searched = 0
        elif block := _BLOCK_END.match(tape.text, at):
            tape.drop(block.end())
            return True
        else:
            searched = end.end()


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
