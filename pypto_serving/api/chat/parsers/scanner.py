"""Read an output that comes in pieces, in the order of its grammar: reasoning first, then content and calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

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
    """One whole tool call. `arguments` is the text of a JSON object, truncated or invalid if the model's was."""

    name: str
    arguments: str


class AssistantMessage(msgspec.Struct):
    """One whole output."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ParsedCall] = []


T = TypeVar("T")
Steps = Generator[None, None, T]
Tools = Mapping[str, Mapping[str, Sequence[str]]]
"""The JSON types of each tool's parameters, by the names of tool and parameter; none are known for some."""


class OutputScanner:
    """The text of one output, and the parts read from it. Owned by one parser; changed by its readers.

    - `text` is what readers have not consumed yet; no more is added once `ended`.
    - `inside` tells whether the reader is inside the reasoning.
    - With `one_call`, calls after the first are read and dropped; with `hides_reasoning`, so is the reasoning.
    """

    __slots__ = ("ended", "hides_reasoning", "inside", "num_calls", "one_call", "parts", "text")

    def __init__(self, one_call: bool = False, hides_reasoning: bool = False) -> None:
        self.text = ""
        self.ended = False
        self.inside = False
        self.num_calls = 0
        self.one_call = one_call
        self.hides_reasoning = hides_reasoning
        self.parts: list[OutputPart] = []

    def drop(self, count: int) -> None:
        """Consume `count` characters of markup."""
        self.text = self.text[count:]

    def say(self, count: int, kind: TextKind = "content") -> None:
        """Consume `count` characters as text of `kind`."""
        if not count:
            return
        text, self.text = self.text[:count], self.text[count:]
        if kind == "reasoning" and self.hides_reasoning:
            return
        last = self.parts[-1] if self.parts else None
        if isinstance(last, TextPart) and last.kind == kind:
            text = last.text + text
            self.parts.pop()
        self.parts.append(TextPart(kind, text))

    def think(self, count: int) -> None:
        """Consume `count` characters as reasoning."""
        self.say(count, "reasoning")

    def call(self, name: str) -> None:
        """Begin a call."""
        self.num_calls += 1
        if not self.one_call or self.num_calls == 1:
            self.parts.append(ToolCallStart(name))

    def arguments(self, text: str) -> None:
        """Add `text` to the arguments of the call."""
        if not text or (self.one_call and self.num_calls > 1):
            return
        last = self.parts[-1] if self.parts else None
        if isinstance(last, ToolCallArguments):
            text = last.text + text
            self.parts.pop()
        self.parts.append(ToolCallArguments(text))

    def argue(self, count: int) -> None:
        """Consume `count` characters as arguments."""
        self.arguments(self.text[:count])
        self.drop(count)

    def quote(self, count: int) -> None:
        """Consume `count` characters as the inside of a JSON string in the arguments."""
        self.arguments(json.dumps(self.text[:count], ensure_ascii=False)[1:-1])
        self.drop(count)


class OutputParser:
    """Parse one output that comes in pieces, with one reader. Where pieces are cut does not change the joined parts.

    A parser never fails: text that is not valid syntax of its family is content.
    """

    def __init__(self, scanner: OutputScanner, reader: Steps[None]) -> None:
        self._scanner = scanner
        self._reader = reader

    def push(self, text: str) -> list[OutputPart]:
        """Add text; return the parts that became certain."""
        self._scanner.text += text
        return self._run()

    def finish(self) -> list[OutputPart]:
        """End the output; return the parts held back."""
        self._scanner.ended = True
        return self._run()

    def _run(self) -> list[OutputPart]:
        next(self._reader, None)
        self._scanner.say(len(self._scanner.text) if self._scanner.ended else 0)
        parts, self._scanner.parts = self._scanner.parts, []
        return parts


def read_output(parser: OutputParser, pieces: Iterable[str]) -> AssistantMessage:
    """Parse a whole output, given in pieces, with a new parser."""
    texts: dict[TextKind, list[str]] = {"reasoning": [], "content": []}
    calls: list[tuple[str, list[str]]] = []
    for part in [part for piece in pieces for part in parser.push(piece)] + parser.finish():
        if isinstance(part, TextPart):
            texts[part.kind].append(part.text)
        elif isinstance(part, ToolCallStart):
            calls.append((part.name, []))
        else:
            calls[-1][1].append(part.text)
    whole = [ParsedCall(name, "".join(arguments)) for name, arguments in calls]
    return AssistantMessage("".join(texts["reasoning"]), "".join(texts["content"]), whole)


def to_json(value: Any) -> str:
    """Write JSON, with characters as they are where UTF-8 has them."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # the model wrote half of a surrogate pair as an escape
        return json.dumps(value)
    return text


def with_gaps(marks: Sequence[str]) -> tuple[str, ...]:
    """Return `marks`, each also with the line breaks that models write before it and that belong to it."""
    return tuple(gap + mark for mark in marks for gap in ("\n\n", "\n", ""))


def seek(scanner: OutputScanner, marks: Sequence[str], give: Callable[[int], None]) -> Steps[str]:
    """`give` the text before the first of `marks`. Return that mark, which is not consumed; "" if there is none.

    A mark may contain another at its end only.
    """
    while True:
        text = scanner.text
        places = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
        if places:
            at, found = min(places, key=lambda place: place[0])
            give(at)
            return found
        give(len(text) - (0 if scanner.ended else max(overlap(text, mark) for mark in marks)))
        if scanner.ended:
            return ""
        yield


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest proper prefix of `mark` that `text` ends with."""
    at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while at >= 0 and not mark.startswith(text[at:]):
        at = text.find(mark[0], at + 1)
    return 0 if at < 0 else len(text) - at


def past_space(scanner: OutputScanner, at: int = 0) -> Steps[int]:
    """Return the index of the first character from `at` on that is not white space; the end if there is none."""
    while True:
        at = len(scanner.text) - len(scanner.text[at:].lstrip())
        if at < len(scanner.text) or scanner.ended:
            return at
        yield


def meets(scanner: OutputScanner, at: int, mark: str) -> Steps[bool]:
    """Tell whether `mark` stands at `at`."""
    while not scanner.ended and len(scanner.text) < at + len(mark) and mark.startswith(scanner.text[at:]):
        yield
    return scanner.text.startswith(mark, at)


def find(scanner: OutputScanner, mark: str, at: int = 0) -> Steps[int]:
    """Return where `mark` begins, from `at` on; -1 if nowhere."""
    while (found := scanner.text.find(mark, at)) < 0 and not scanner.ended:
        at = max(at, len(scanner.text) - len(mark) + 1)
        yield
    return found


def drop_if(scanner: OutputScanner, mark: str) -> Steps[bool]:
    """Consume white space and `mark` if they come next; tell whether they did."""
    at = yield from past_space(scanner)
    found = yield from meets(scanner, at, mark)
    if found:
        scanner.drop(at + len(mark))
    return found


def read_marked(
    scanner: OutputScanner,
    starts: Sequence[str],
    read: Callable[[OutputScanner, int], Steps[bool]],
    ends: Sequence[str] = (),
    more: Sequence[str] | None = None,
) -> Steps[None]:
    """Read content, and with `read` the calls after each of `starts`. If there are none, `read` consumes nothing.

    After calls, `ends` are consumed. So is white space before one of `more`, by default `starts`, and at the end.
    """
    sought = with_gaps(starts)
    while mark := (yield from seek(scanner, sought, scanner.say)):
        if (yield from read(scanner, len(mark))):
            for end in ends:
                yield from drop_if(scanner, end)
            yield from end_calls(scanner, *(starts if more is None else more))
        else:
            scanner.say(len(mark))


def end_calls(scanner: OutputScanner, *marks: str) -> Steps[None]:
    """Consume the white space after a call if one of `marks` or the end of the output follows."""
    at = yield from past_space(scanner)
    for mark in marks:
        if (yield from meets(scanner, at, mark)):
            scanner.drop(at)
            return
    if at == len(scanner.text):
        scanner.drop(at)


class Thinking(msgspec.Struct, frozen=True):
    """How the outputs of one prompt begin with reasoning.

    With `opened` every output begins inside the reasoning. Else an output has reasoning if it begins with `start`. The
    reasoning ends with `end`, or before one of `calls`.
    """

    start: str
    end: str
    opened: bool = False
    calls: tuple[str, ...] = ()


def read_reasoning(scanner: OutputScanner, thinking: Thinking) -> Steps[None]:
    """Read the reasoning, if there is any. Without an end all of the output is reasoning."""
    at = yield from past_space(scanner)
    starts = yield from meets(scanner, at, thinking.start)
    if starts:
        scanner.drop(at + len(thinking.start))
    if starts or thinking.opened:
        scanner.inside = True
        mark = yield from seek(scanner, (thinking.end, *thinking.calls), scanner.think)
        scanner.inside = False
        if mark == thinking.end:
            scanner.drop(len(mark))
            yield from _drop_lines(scanner)


def _drop_lines(scanner: OutputScanner) -> Steps[None]:
    """Consume the line breaks after the reasoning; they belong to the model's form, not to its answer."""
    while True:
        scanner.text = scanner.text.lstrip("\r\n")
        if scanner.text or scanner.ended:
            return
        yield


class ReasoningCount:
    """Count the tokens of the reasoning of one output, without its marks where they are whole tokens."""

    __slots__ = ("_reader", "_scanner", "done", "num_tokens")

    def __init__(self, thinking: Thinking) -> None:
        self._scanner = OutputScanner(hides_reasoning=True)
        self._scanner.inside = thinking.opened
        self._reader = read_reasoning(self._scanner, thinking)
        self.num_tokens = 0
        self.done = False

    def push(self, text: str) -> None:
        """Add one token with its `text`; sets `done` once all later tokens are content."""
        before = self._scanner.inside
        self._scanner.text += text
        self.done = next(self._reader, self) is self
        self.num_tokens += before and self._scanner.inside
