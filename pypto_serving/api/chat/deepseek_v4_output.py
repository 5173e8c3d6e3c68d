"""Parse the outputs of DeepSeek V4: reasoning up to `</think>`, then content, then calls in DSML."""

from __future__ import annotations

import msgspec

from pypto_serving.api.chat.dsml import CALLS_START, BlockReader
from pypto_serving.api.chat.output import Part, TextKind, TextPart

THINK_END = "</think>"
_GAP = "\n\n"
"""Precedes a block of calls and belongs to it."""


class DeepseekV4Format(msgspec.Struct, frozen=True):
    """How to parse the outputs of one prompt; see DeepseekV4Parser. Called, it makes a parser."""

    thinks: bool
    reads_calls: bool

    def __call__(self) -> DeepseekV4Parser:
        return DeepseekV4Parser(self.thinks, self.reads_calls)


class DeepseekV4Parser:
    """Parse one output. See OutputParser. Owned by the reader of that output.

    - With `thinks` the output begins as reasoning; without a `</think>` all of it is reasoning.
    - With `reads_calls` a block of calls is read; text after it is content again.
    - Of a block that is cut or malformed, everything from the first unreadable call on is content.
    """

    def __init__(self, thinks: bool, reads_calls: bool) -> None:
        self._thinks = thinks
        self._reads_calls = reads_calls
        self._held = ""
        self._block: BlockReader | None = None
        self._block_start = ""

    def push(self, text: str) -> list[Part]:
        """Add text; return the parts that became certain."""
        parts: list[Part] = []
        more: str | None = text
        while more is not None:
            if self._thinks:
                more = self._reason(more, parts)
            elif self._block is not None:
                more = self._call(self._block, more, parts)
            else:
                more = self._say(more, parts)
        return parts

    def finish(self) -> list[Part]:
        """End the output; return the parts held back."""
        parts: list[Part] = []
        if self._block is None:
            _add("reasoning" if self._thinks else "content", self._held, parts)
        elif self._block.rest.strip() or self._block_start:
            _add("content", self._block_start + self._block.rest, parts)
        return parts

    def _reason(self, text: str, parts: list[Part]) -> str | None:
        """Read reasoning. Like each state, return the text left for the next state, None if this state goes on."""
        before, mark, after = (self._held + text).partition(THINK_END)
        if mark:
            self._thinks, self._held = False, ""
            _add("reasoning", before, parts)
            return after
        self._hold("reasoning", before, _overlap(before, THINK_END), parts)
        return None

    def _say(self, text: str, parts: list[Part]) -> str | None:
        before, mark, after = (self._held + text).partition(CALLS_START) if self._reads_calls else (text, "", "")
        if mark:
            content = before.removesuffix(_GAP)
            self._block, self._held = BlockReader(), ""
            self._block_start = before[len(content) :] + mark
            _add("content", content, parts)
            return after
        overlap = max(_overlap(before, _GAP + CALLS_START), _overlap(before, CALLS_START)) if self._reads_calls else 0
        self._hold("content", before, overlap, parts)
        return None

    def _call(self, block: BlockReader, text: str, parts: list[Part]) -> str | None:
        calls = block.push(text)
        parts += calls
        if calls:
            self._block_start = ""
        if not block.ended:
            return None
        self._block, self._block_start = None, ""
        return block.rest

    def _hold(self, kind: TextKind, text: str, count: int, parts: list[Part]) -> None:
        """Give out `text` without its last `count` characters; hold those back."""
        end = len(text) - count
        self._held = text[end:]
        _add(kind, text[:end], parts)


def _add(kind: TextKind, text: str, parts: list[Part]) -> None:
    if text:
        parts.append(TextPart(kind, text))


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest proper prefix of `mark` that `text` ends with."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
