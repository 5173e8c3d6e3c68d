"""Read calls of models without a form of their own: an output that begins with JSON, maybe in a code block."""

from __future__ import annotations

from pypto_serving.api.chat.parsers.json_calls import FIRST_KEY, SPACE, read_array
from pypto_serving.api.chat.parsers.scanner import OutputScanner, Steps, Tools, drop_if, end_calls, meets, past_space

FENCE, FENCE_END = "```json", "```"
OPENS = rf"{SPACE}(?:{FENCE}{SPACE})?(?:\[{SPACE})?{FIRST_KEY}"


def read(scanner: OutputScanner, tools: Tools) -> Steps[None]:
    """Read calls, which must name one of `tools`, and then content."""
    at = yield from past_space(scanner)
    fenced = yield from meets(scanner, at, FENCE)
    if (yield from read_array(scanner, at + len(FENCE) * fenced, tools)):
        if fenced:
            yield from drop_if(scanner, FENCE_END)
        yield from end_calls(scanner)
    yield from read_content(scanner)


def read_content(scanner: OutputScanner) -> Steps[None]:
    """Read content up to the end of the output."""
    while not scanner.ended:
        scanner.say(len(scanner.text))
        yield
