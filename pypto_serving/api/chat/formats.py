"""The formats of outputs that need parsing. Called, one makes the parser of one output."""

from __future__ import annotations

import uuid

import msgspec

from pypto_serving.api.chat.parsers.families import FAMILIES
from pypto_serving.api.chat.parsers.scanner import OutputScanner, ScannerParser, Steps
from pypto_serving.api.chat.parsers.thinking import Thinking, read_reasoning

SHORT_ID = 9


class Calls(msgspec.Struct, frozen=True):
    """How the outputs of one prompt call tools.

    - `family`: one of FAMILIES
    - `types`: the JSON types of each tool's parameters, by the names of tool and parameter
    - `one`: calls after the first are dropped
    """

    family: str
    types: dict[str, dict[str, list[str]]] = {}
    one: bool = False


class OutputFormat(msgspec.Struct, frozen=True):
    """How to parse the outputs of one prompt: reasoning first, then content and calls.

    With `shows_special` a mark is a special token, so they must stay in the text.
    """

    thinking: Thinking | None = None
    calls: Calls | None = None
    shows_special: bool = False
    hides_reasoning: bool = False

    def __call__(self) -> ScannerParser:
        one_call = self.calls is not None and self.calls.one
        scanner = OutputScanner(one_call, self.hides_reasoning)
        return ScannerParser(scanner, _read(scanner, self))

    def new_call_id(self, prefix: str) -> str:
        """Make the id of a call, for Mistral's templates as short as they take it."""
        made = uuid.uuid4().hex
        short = self.calls is not None and FAMILIES[self.calls.family].short_ids
        return made[:SHORT_ID] if short else prefix + made


def _read(scanner: OutputScanner, form: OutputFormat) -> Steps[None]:
    if form.thinking is not None:
        yield from read_reasoning(scanner, form.thinking)
    if form.calls is not None:
        yield from FAMILIES[form.calls.family].read(scanner, form.calls.types)
    while not scanner.ended:
        scanner.say(len(scanner.text))
        yield
