"""Read an output that comes in pieces, in the order of its grammar: reasoning first, then content and calls."""

from __future__ import annotations

import json
import re
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
    """One whole output. `broken`: the arguments of one of the calls are not whole."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ParsedCall] = []
    broken: bool = False


T = TypeVar("T")
_SPACE, _EXACT_SPACE = re.compile(r"[\s\x00-\x1f]*"), re.compile(r"\s*")
Steps = Generator[None, None, T]
Tools = Mapping[str, Mapping[str, Sequence[str]]]
"""The JSON types of each tool's parameters, by the names of tool and parameter; none are known for some."""


MAX_HELD, MAX_SAID = 1024, 48
"""Characters of a call that are held back until it is known to be whole; characters of the content to look back at."""


class OutputScanner:
    """The text of one output, and the parts read from it. Owned by one parser; changed by its readers.

    - `text` is what readers have not consumed yet; no more is added once `ended`.
    - `inside` tells whether the reader is inside the reasoning. `said` is the end of the content so far.
    - `broken` tells whether a call was given out whose arguments are not whole.
    - With `one_call`, calls after the first are read and dropped; with `hides_reasoning`, so is the reasoning. With
      `exact`, a grammar wrote the calls, and only what it writes as a beginning of calls is one.
    """

    __slots__ = (
        "_before",
        "_num_taken",
        "_taken",
        "broken",
        "ended",
        "exact",
        "hides_reasoning",
        "inside",
        "num_calls",
        "one_call",
        "parts",
        "said",
        "text",
    )

    def __init__(self, one_call: bool = False, hides_reasoning: bool = False, exact: bool = False) -> None:
        self.text = self.said = ""
        self.ended = self.inside = self.broken = False
        self.num_calls = 0
        self.one_call = one_call
        self.hides_reasoning = hides_reasoning
        self.exact = exact
        self.parts: list[OutputPart] = []
        self._taken: list[str] | None = None
        self._num_taken = 0
        self._before = (0, 0)

    def begin(self) -> None:
        """Hold back what follows until `keep` or `undo`."""
        self._taken, self._num_taken, self._before = [], 0, (len(self.parts), self.num_calls)

    def keep(self) -> None:
        """Give out what was held back: a call is whole."""
        self._taken, self.said = None, ""

    def undo(self) -> bool:
        """Put back all since `begin`; False if that is too long, so that a broken call stands."""
        given, taken, self._taken = self._given, self._taken or [], None
        num_parts, num_calls = self._before
        if given:
            self.broken = True
            return False
        self.text = "".join(taken) + self.text
        self.num_calls = num_calls
        del self.parts[num_parts:]
        return True

    def take(self) -> list[OutputPart]:
        """Return the parts that are certain."""
        if self._taken is None or self._given:
            parts, self.parts = self.parts, []
            return parts
        num_parts, num_calls = self._before
        parts, self.parts, self._before = self.parts[:num_parts], self.parts[num_parts:], (0, num_calls)
        return parts

    @property
    def _given(self) -> bool:
        """Tell whether a call is too long to be held back."""
        return self._num_taken > MAX_HELD and self.num_calls > self._before[1]

    def drop(self, count: int) -> None:
        """Consume `count` characters of markup."""
        if self._taken is not None:
            if not self._given:
                self._taken.append(self.text[:count])
            self._num_taken += count
        self.text = self.text[count:]

    def say(self, count: int, kind: TextKind = "content") -> None:
        """Consume `count` characters as text of `kind`."""
        if not count:
            return
        text, self.text = self.text[:count], self.text[count:]
        if kind == "content":
            self.said = text[-MAX_SAID:] if len(text) >= MAX_SAID else (self.said + text)[-MAX_SAID:]
        elif self.hides_reasoning:
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

    @property
    def broken(self) -> bool:
        """Tell whether a call was given out whose arguments are not whole."""
        return self._scanner.broken

    def push(self, text: str, ends: bool = False) -> list[OutputPart]:
        """Add text; return the parts that became certain, and those held back if the output `ends`."""
        self._scanner.text += text
        parts = self._run()
        return parts + self.finish() if ends else parts

    def finish(self) -> list[OutputPart]:
        """End the output; return the parts held back."""
        self._scanner.ended = True
        return self._run()

    def _run(self) -> list[OutputPart]:
        next(self._reader, None)
        self._scanner.say(len(self._scanner.text) if self._scanner.ended else 0)
        return self._scanner.take()


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
    return AssistantMessage("".join(texts["reasoning"]), "".join(texts["content"]), whole, parser.broken)


def to_json(value: Any) -> str:
    """Write JSON, with characters as they are where UTF-8 has them."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # the model wrote half of a surrogate pair as an escape
        return json.dumps(value)
    return text


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
    """Return the index of the first character from `at` on that is not white space; the end if there is none.

    Control characters count as white space, but not where a grammar wrote the calls.
    """
    space = _EXACT_SPACE if scanner.exact else _SPACE
    while True:
        found = space.match(scanner.text, at)
        at = at if found is None else found.end()
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


def end_calls(scanner: OutputScanner, marks: Sequence[str] = ()) -> Steps[None]:
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
