"""Read the calls of Mistral: `[TOOL_CALLS][{...}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` for each call."""

from __future__ import annotations

import re

from pypto_serving.api.chat.parsers.json_calls import read_array, read_head, stream_arguments
from pypto_serving.api.chat.parsers.tape import Steps, Tape, Tools, end_calls, past_space, seek, with_gaps

MARK, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
STARTS = (MARK,)
_SOUGHT = with_gaps(STARTS)
_NAME = re.compile(r"([\w.:/-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_MAX_NAME = 512


def read(tape: Tape, tools: Tools) -> Steps[None]:
    """Read content and calls."""
    while mark := (yield from seek(tape, _SOUGHT, tape.say)):
        if (yield from read_array(tape, len(mark))) or (yield from _read_named(tape, len(mark))):
            yield from end_calls(tape, MARK)
        else:
            tape.say(len(mark))


def _read_named(tape: Tape, at: int) -> Steps[bool]:
    at = yield from past_space(tape, at)
    head = yield from read_head(tape, at, _NAME, "{", _MAX_NAME)
    if head is None:
        return False
    tape.call(head[1])
    tape.drop(head.end())
    yield from stream_arguments(tape)
    return True
