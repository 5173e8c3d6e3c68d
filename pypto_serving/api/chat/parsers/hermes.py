"""Read the calls of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from pypto_serving.api.chat.parsers.json_calls import read_calls
from pypto_serving.api.chat.parsers.scanner import OutputScanner, Steps, Tools, drop_if, end_calls, seek, with_gaps

START, END = "<tool_call>", "</tool_call>"
STARTS = (START,)
_SOUGHT = with_gaps(STARTS)


def read(scanner: OutputScanner, tools: Tools) -> Steps[None]:
    """Read content and calls."""
    while mark := (yield from seek(scanner, _SOUGHT, scanner.say)):
        if (yield from read_calls(scanner, len(mark))):
            yield from drop_if(scanner, END)
            yield from end_calls(scanner, START)
        else:
            scanner.say(len(mark))
