"""Read the calls of Llama 3: JSON after `<|python_tag|>`, or alone at the beginning, with `;` between several."""

from __future__ import annotations

from pypto_serving.api.chat.parsers.json_calls import read_calls
from pypto_serving.api.chat.parsers.tape import Steps, Tape, Tools, end_calls, seek, with_gaps

TAG = "<|python_tag|>"
_TAGS = with_gaps(TAG)


def read(tape: Tape, tools: Tools) -> Steps[None]:
    """Read content and calls. Without the tag a call must name one of `tools`: the content may be JSON, too."""
    if (yield from read_calls(tape, 0, tools, ";")):
        yield from end_calls(tape, TAG)
    while mark := (yield from seek(tape, _TAGS, tape.say)):
        if (yield from read_calls(tape, len(mark), separator=";")):
            yield from end_calls(tape, TAG)
        else:
            tape.say(len(mark))
