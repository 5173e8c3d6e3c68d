"""Read the calls of Llama 3: JSON after `<|python_tag|>`, or alone at the beginning, with `;` between several."""

from __future__ import annotations

from pypto_serving.api.chat.parsers.json_calls import FIRST_KEY, SPACE, read_calls
from pypto_serving.api.chat.parsers.scanner import OutputScanner, Steps, Tools, end_calls, seek, with_gaps

TAG = "<|python_tag|>"
STARTS = (TAG,)
SEPARATOR = ";"
OPENS = rf"{SPACE}{FIRST_KEY}"
GOES_ON = rf"{SPACE}{SEPARATOR}?{OPENS}"
_SOUGHT = with_gaps(STARTS)


def read(scanner: OutputScanner, tools: Tools) -> Steps[None]:
    """Read content and calls. Without the tag a call must name one of `tools`: the content may be JSON, too."""
    if (yield from read_calls(scanner, 0, tools, SEPARATOR)):
        yield from end_calls(scanner, TAG)
    while mark := (yield from seek(scanner, _SOUGHT, scanner.say)):
        if (yield from read_calls(scanner, len(mark), separator=SEPARATOR)):
            yield from end_calls(scanner, TAG)
        else:
            scanner.say(len(mark))
