"""What the output of a chat model is made of, once its family's parser has read it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol

import msgspec

TextKind = Literal["reasoning", "content"]


class TextPart(msgspec.Struct, frozen=True):
    """More text of the model's reasoning, or of what it says to the user; never empty."""

    kind: TextKind
    text: str


class ToolCall(msgspec.Struct, frozen=True):
    """One complete call. `arguments` is a JSON object, as text."""

    name: str
    arguments: str


Part = TextPart | ToolCall


class OutputParser(Protocol):
    """Reads one output in pieces. Whatever the pieces are, the parts, texts of a kind joined, are the same.

    Never fails: what is no valid syntax of its family is content.
    """

    def push(self, text: str) -> list[Part]:
        """The parts that became certain with `text`."""

    def finish(self) -> list[Part]:
        """What was held back, at the end of the output."""


NewParser = Callable[[], OutputParser]
"""Makes the parser of one output."""


class AssistantMessage(msgspec.Struct):
    """A whole output."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = []


def read_output(parser: OutputParser, texts: Iterable[str]) -> AssistantMessage:
    """The message that `texts`, joined, are; `parser` must be new."""
    parts = [part for text in texts for part in parser.push(text)] + parser.finish()
    calls = [part for part in parts if isinstance(part, ToolCall)]
    return AssistantMessage(_text_of(parts, "reasoning"), _text_of(parts, "content"), calls)


def _text_of(parts: Sequence[Part], kind: TextKind) -> str:
    return "".join(part.text for part in parts if isinstance(part, TextPart) and part.kind == kind)
