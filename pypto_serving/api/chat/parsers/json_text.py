"""Read calls of models without a form of their own: an output that begins with JSON, maybe in a code block."""

from __future__ import annotations

from pypto_serving.api.chat.parsers.json_calls import FIRST_KEY, SPACE, read_array
from pypto_serving.api.chat.parsers.tape import Steps, Tape, Tools, drop_if, end_calls, meets, past_space

FENCE, FENCE_END = "```json", "```"
OPENS = rf"{SPACE}(?:{FENCE}{SPACE})?(?:\[{SPACE})?{FIRST_KEY}"


def read(tape: Tape, tools: Tools) -> Steps[None]:
    """Read calls, which must name one of `tools`, and then content."""
    at = yield from past_space(tape)
    fenced = yield from meets(tape, at, FENCE)
    if (yield from read_array(tape, at + len(FENCE) * fenced, tools)):
        if fenced:
            yield from drop_if(tape, FENCE_END)
        yield from end_calls(tape)
    yield from read_content(tape)


def read_content(tape: Tape) -> Steps[None]:
    """Read content up to the end of the output."""
    while not tape.ended:
        tape.say(len(tape.text))
        yield
