"""Interface of chat encoders, which make prompts, and the format of outputs, by model family."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec

from pypto_serving.api.chat.parsers.families import FAMILIES
from pypto_serving.api.chat.parsers.scanner import OutputParser, OutputScanner, Steps, Thinking, read_reasoning

SHORT_ID = 9


class Calls(msgspec.Struct, frozen=True):
    """Form of the tool calls in the outputs of one prompt.

    - `family`: one of FAMILIES
    - `types`: the JSON types of each tool's parameters: types[tool][parameter]
    - `one`: drop all calls after the first
    - `exact`: a grammar writes calls, of all functions or of strict ones
    """

    family: str
    types: dict[str, dict[str, list[str]]] = {}
    one: bool = False
    exact: bool = False


class OutputFormat(msgspec.Struct, frozen=True):
    """Format of the outputs of one prompt: reasoning first, then content and calls.

    With `shows_special`, some marks are special tokens, so detokenizing must keep special tokens.
    """

    thinking: Thinking | None = None
    calls: Calls | None = None
    shows_special: bool = False
    hides_reasoning: bool = False

    def __call__(self) -> OutputParser:
        one, exact = (False, False) if self.calls is None else (self.calls.one, self.calls.exact)
        scanner = OutputScanner(one, self.hides_reasoning, exact)
        return OutputParser(scanner, _read(scanner, self))

    def new_call_id(self, prefix: str) -> str:
        """Make the id of a call; it is short for Mistral's templates, which accept only short ones."""
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


Message = Mapping[str, Any]


class ChatOrigin(NamedTuple):
    """Origin of template and parsers: for each, its name, "off" or "none", and the reason for the choice."""

    template: tuple[str, str]
    tool_calls: tuple[str, str]
    reasoning: tuple[str, str]


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """A prompt, as text or token ids. `new_parser` makes the parser of one output; None if outputs are plain text."""

    prompt: str | list[int]
    new_parser: OutputFormat | None = None


class ChatEncoder(Protocol):
    """Encodes conversations for one model family. Stateless after loading."""

    @property
    def request_fields(self) -> frozenset[str]:
        """Return the request fields besides `messages` that `encode` takes in `kwargs`.

        Raises RequestError if the model cannot chat at all.
        """

    @property
    def abilities(self) -> tuple[str, ...]:
        """Return what chats may have: "tools", whose calls are parsed, and "thinking"."""

    def encode(self, messages: Sequence[Message], kwargs: Mapping[str, Any]) -> EncodedChat:
        """Make the prompt. Raises RequestError if the family cannot express a message.

        Each message has `role`, `content` (a string) and any other fields of the client. `kwargs` holds
        the client's chat_template_kwargs and its values of `request_fields`, and may hold `add_generation_prompt`,
        `continue_final_message`, `tools`, `documents`, `reasoning_effort` and `chat_template`.
        """
