"""ReasoningState: separate the reasoning of an output from its content."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from typing import Literal

from pypto_serving.types.guide import Reasoning

Stage = Literal["opening", "reasoning", "content"]


class TokenTexts:
    """The bytes of each token of a vocabulary. Owns an index of them; see `beyond`."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self._texts = texts
        self._beyond: dict[bytes, list[list[int]]] = {}

    def __getitem__(self, token_id: int) -> bytes:
        return self._texts[token_id]

    def beyond(self, mark: bytes) -> list[list[int]]:
        """Return, for each n, the tokens that complete `mark` after its first n bytes and continue. Slow at first."""
        if mark not in self._beyond:
            ends = [(i, text) for i, text in enumerate(self._texts) if mark[-1:] in text[:-1]]
            self._beyond[mark] = [
                [i for i, text in ends if text.startswith(mark[n:]) and len(text) > len(mark) - n]
                for n in range(1, len(mark))
            ]
            self._beyond[mark].insert(0, [i for i, text in ends if mark in text[:-1]])
        return self._beyond[mark]


class ReasoningState:
    """The stage of an output, determined only by its text, not by its tokens; see Reasoning. Owned by a RowGuide.

    opening      all text so far is white space, or the beginning of `begin`
    reasoning    neither `end` nor one of `calls` has appeared
    content      the rest. `content_ids`: the last tokens, if they belong to the content because they begin a call

    `texts`: the texts of all tokens.
    """

    def __init__(self, reasoning: Reasoning, max_tokens: int | None, texts: TokenTexts) -> None:
        self.stage: Stage = "opening" if reasoning.begin else "reasoning"
        self.content_ids: tuple[int, ...] = ()
        self._reasoning = reasoning
        self._max_tokens = max_tokens
        self._texts = texts
        self._end = reasoning.end.encode()
        self._marks = [self._end, *(call.encode() for call in reasoning.calls)]
        self._opening = b""
        self._num_opened = 0
        self._num_tokens = 0
        self._tail: deque[tuple[int, bytes]] = deque(maxlen=max(map(len, self._marks)))
        """The last tokens of the reasoning, as many as the longest mark has bytes, which suffices to contain it."""

    def copy(self) -> ReasoningState:
        """Return a copy of this state."""
        copied = copy.copy(self)
        copied._tail = self._tail.copy()
        return copied

    def push(self, token_id: int) -> None:
        """Append a token."""
        if self.stage == "opening":
            self._open(token_id)
        elif self.stage == "reasoning":
            self._num_tokens += 1
            self._think(token_id, self._texts[token_id])

    def _open(self, token_id: int) -> None:
        begin, ids = self._reasoning.begin, self._reasoning.begin_ids
        self._opening += self._texts[token_id]
        text = self._opening.decode(errors="ignore").lstrip()
        if text.startswith(begin):
            self.stage = "reasoning"
            self._think(token_id, text[len(begin) :].encode())
        elif not begin.startswith(text):
            self.stage = "content"
        elif text:
            self._num_opened = self._num_opened + 1 if token_id == self.opening_id else len(ids)

    def _think(self, token_id: int, text: bytes) -> None:
        self._tail.append((token_id, text))
        read = b"".join(piece for _, piece in self._tail)
        places = [(at, mark) for mark in self._marks if (at := read.find(mark)) >= 0]
        if not places:
            return
        at, mark = min(places)
        self.stage = "content"
        if mark != self._end:
            missing, begun = len(read) - at, 0
            while missing > 0:
                begun += 1
                missing -= len(self._tail[-begun][1])
            self.content_ids = tuple(token_id for token_id, _ in list(self._tail)[-begun:])

    @property
    def has_reasoned(self) -> bool:
        """Return whether the output has reasoning."""
        return self.stage == "reasoning" or bool(self._tail)

    @property
    def opening_id(self) -> int | None:
        """Return the next token of `begin_ids` in the stage `opening`; None if the output deviates from them."""
        ids = self._reasoning.begin_ids
        return ids[self._num_opened] if self._num_opened < len(ids) else None

    def forced(self) -> tuple[int, ...]:
        """Return the tokens that must follow: the rest of `end_ids` once the limit of reasoning tokens is reached."""
        if self.stage != "reasoning" or self._max_tokens is None or self._num_tokens < self._max_tokens:
            return ()
        end, last = self._reasoning.end_ids, tuple(token_id for token_id, _ in self._tail)
        for length in range(min(len(last), len(end) - 1), 0, -1):
            if last[-length:] == end[:length]:
                return end[length:]
        return end

    def beyond(self) -> list[int]:
        """Return the tokens that would complete a mark and continue with content that no grammar has checked."""
        read = b"".join(piece for _, piece in self._tail)
        return [
            token_id
            for mark in self._marks
            for n, ids in enumerate(self._texts.beyond(mark))
            if ids and read.endswith(mark[:n])
            for token_id in ids
        ]
