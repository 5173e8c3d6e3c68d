"""Read the calls of DeepSeek V3, R1 and V3.1, whose marks are special tokens.

- V3 and R1: the word `function`, a separator, the name, and the arguments in a code block
- V3.1: the name, a separator, and the arguments
"""

from __future__ import annotations

import re

from pypto_serving.api.chat.parsers.json_calls import read_head, stream_arguments
from pypto_serving.api.chat.parsers.scanner import OutputScanner, Steps, Tools, drop_if, end_calls, seek, with_gaps

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCE, FENCE_END = "```json", "```"
STARTS = (CALLS + CALL, CALL)
_SOUGHT = with_gaps(STARTS)
_HEAD = re.compile(rf"(?:function{SEPARATOR}([^\n<]+)\n{FENCE}\s*|([^\n<]+){SEPARATOR}\s*)(?=\{{)")
_MAX_HEAD = 512


def read(scanner: OutputScanner, tools: Tools) -> Steps[None]:
    """Read content and calls."""
    while mark := (yield from seek(scanner, _SOUGHT, scanner.say)):
        head = yield from read_head(scanner, len(mark), _HEAD, "{", _MAX_HEAD)
        if head is None:
            scanner.say(len(mark))
            continue
        scanner.call(head[1] or head[2])
        scanner.drop(head.end())
        yield from stream_arguments(scanner)
        if head[1] is not None:
            yield from drop_if(scanner, FENCE_END)
        yield from drop_if(scanner, CALL_END)
        yield from drop_if(scanner, CALLS_END)
        yield from end_calls(scanner, CALL, CALLS)
