"""Read the calls of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from pypto_serving.api.chat.parsers.json_calls import read_calls
from pypto_serving.api.chat.parsers.tape import Steps, Tape, Tools, drop_if, end_calls, seek, with_gaps

START, END = "<tool_call>", "</tool_call>"
STARTS = (START,)
_SOUGHT = with_gaps(STARTS)


def read(tape: Tape, tools: Tools) -> Steps[None]:
    """Read content and calls."""
    while mark := (yield from seek(tape, _SOUGHT, tape.say)):
        if (yield from read_calls(tape, len(mark))):
            yield from drop_if(tape, END)
            yield from end_calls(tape, START)
        else:
            tape.say(len(mark))
