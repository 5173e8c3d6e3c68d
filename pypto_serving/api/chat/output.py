"""Describe parsed chat outputs: reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol

import msgspec

TextKind = Literal["reasoning", "content"]


class TextPart(msgspec.Struct, frozen=True):
    """More text of the reasoning or of the content; never empty."""

    kind: TextKind
    text: str


class ToolCall(msgspec.Struct, frozen=True):
    """One complete tool call. `arguments` is a JSON object, as text."""

    name: str
    arguments: str


Part = TextPart | ToolCall


class OutputParser(Protocol):
    """Parse one output that comes in pieces. How it is cut does not change the joined parts.

    A parser never fails: text that is not valid syntax of its family is content.
    """

    def push(self, text: str) -> list[Part]:
        """Add text; return the parts that became certain."""

    def finish(self) -> list[Part]:
        """End the output; return the parts held back."""


NewParser = Callable[[], OutputParser]
"""Makes the parser of one output."""


class AssistantMessage(msgspec.Struct):
    """One whole output."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = []


def read_output(parser: OutputParser, texts: Iterable[str]) -> AssistantMessage:
    """Parse a whole output, given in pieces, with a new parser."""
    parts = [part for text in texts for part in parser.push(text)] + parser.finish()
    calls = [part for part in parts if isinstance(part, ToolCall)]
    return AssistantMessage(_text_of(parts, "reasoning"), _text_of(parts, "content"), calls)


def _text_of(parts: Sequence[Part], kind: TextKind) -> str:
    return "".join(part.text for part in parts if isinstance(part, TextPart) and part.kind == kind)
