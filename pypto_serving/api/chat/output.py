"""Describe parsed chat outputs: reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, Protocol

import msgspec

TextKind = Literal["reasoning", "content"]


class TextPart(msgspec.Struct, frozen=True):
    """More text of the reasoning or of the content; never empty."""

    kind: TextKind
    text: str


class ToolCallStart(msgspec.Struct, frozen=True):
    """A tool call begins."""

    name: str


class ToolCallArguments(msgspec.Struct, frozen=True):
    """More text of the arguments of the call that began last; never empty."""

    text: str


OutputPart = TextPart | ToolCallStart | ToolCallArguments


class ParsedCall(msgspec.Struct, frozen=True):
    """One whole tool call. `arguments` is a JSON object, as text; cut or wrong where the model wrote it so."""

    name: str
    arguments: str


class OutputParser(Protocol):
    """Parse one output that comes in pieces. How it is cut does not change the joined parts.

    A parser never fails: text that is not valid syntax of its family is content.
    """

    def push(self, text: str) -> list[OutputPart]:
        """Add text; return the parts that became certain."""

    def finish(self) -> list[OutputPart]:
        """End the output; return the parts held back."""


NewParser = Callable[[], OutputParser]
"""Makes the parser of one output."""


class AssistantMessage(msgspec.Struct):
    """One whole output."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ParsedCall] = []


def read_output(parser: OutputParser, texts: Iterable[str]) -> AssistantMessage:
    """Parse a whole output, given in pieces, with a new parser."""
    return join_parts([part for text in texts for part in parser.push(text)] + parser.finish())


def join_parts(parts: Iterable[OutputPart]) -> AssistantMessage:
    """Join all parts of one output."""
    texts: dict[TextKind, list[str]] = {"reasoning": [], "content": []}
    calls: list[tuple[str, list[str]]] = []
    for part in parts:
        if isinstance(part, TextPart):
            texts[part.kind].append(part.text)
        elif isinstance(part, ToolCallStart):
            calls.append((part.name, []))
        else:
            calls[-1][1].append(part.text)
    whole = [ParsedCall(name, "".join(pieces)) for name, pieces in calls]
    return AssistantMessage("".join(texts["reasoning"]), "".join(texts["content"]), whole)
