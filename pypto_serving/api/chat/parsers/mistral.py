"""Read the calls of Mistral: `[TOOL_CALLS][{...}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` for each call."""

from __future__ import annotations

import re

from pypto_serving.api.chat.parsers.json_calls import read_array, read_head, stream_arguments
from pypto_serving.api.chat.parsers.scanner import OutputScanner, Steps, Tools, end_calls, past_space, seek, with_gaps

MARK, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
STARTS = (MARK,)
_SOUGHT = with_gaps(STARTS)
_NAME = re.compile(r"([\w.:/-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_MAX_NAME = 512


def read(scanner: OutputScanner, tools: Tools) -> Steps[None]:
    """Read content and calls."""
    while mark := (yield from seek(scanner, _SOUGHT, scanner.say)):
        if (yield from read_array(scanner, len(mark))) or (yield from _read_named(scanner, len(mark))):
            yield from end_calls(scanner, MARK)
        else:
            scanner.say(len(mark))


def _read_named(scanner: OutputScanner, at: int) -> Steps[bool]:
    at = yield from past_space(scanner, at)
    head = yield from read_head(scanner, at, _NAME, "{", _MAX_NAME)
    if head is None:
        return False
    scanner.call(head[1])
    scanner.drop(head.end())
    yield from stream_arguments(scanner)
    return True
