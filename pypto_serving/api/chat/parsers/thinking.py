"""Read the reasoning at the beginning of an output."""

from __future__ import annotations

import msgspec

from pypto_serving.api.chat.parsers.scanner import OutputScanner, Steps, meets, past_space, seek


class Thinking(msgspec.Struct, frozen=True):
    """How the outputs of one prompt begin with reasoning.

    With `opened` every output begins within it, else one that begins with `start`. It ends at `end`, which belongs to
    it, or before one of `calls`.
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
