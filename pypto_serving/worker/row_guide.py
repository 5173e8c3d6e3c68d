"""RowGuide: what a row with a guide may choose next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from pypto_serving.errors import RequestError
from pypto_serving.guidance import Matcher
from pypto_serving.types.adjustments import MaskArray
from pypto_serving.types.guide import Guide
from pypto_serving.worker.reasoning import ReasoningState, TokenTexts

MAX_FORCED = 128
"""Tokens that a row appends at once."""


class RowGuide:
    """Follows the output of one row. Used by one thread at a time.

    What it says depends on the guide and on the output tokens alone, so a row that starts anew with all of its tokens
    goes on as before. After `advance`, of the next token:

    - `fault`: why the row cannot go on, or None.
    - `forced`: tokens that must follow, to be appended without sampling. () for a row that does not jump.
    - `mask`: the tokens that may be chosen, or None for all.
    - `is_done`: whether nothing is restricted any more.

    `output` has the tokens so far.
    """

    def __init__(self, guide: Guide, eos_ids: Sequence[int], jumps: bool) -> None:
        self.guide = guide
        self.eos_ids = eos_ids
        self.output: list[int] = []
        self.fault: RequestError | None = None
        self.forced: tuple[int, ...] = ()
        self.mask: MaskArray | None = None
        self.is_done = False
        self._jumps = jumps
        self._state: ReasoningState | None = None
        self._start: Matcher | None = None
        self._matcher: Matcher | None = None
        self._ended = False
        self._bits: MaskArray = np.empty(0, np.uint32)

    def open(self, start: Matcher | None, num_words: int, texts: TokenTexts) -> None:
        """Stand before the first token. `start` is copied where the content begins; None for no grammar."""
        self.fault = None
        self.output.clear()
        self._start = start
        self._ended = False
        self._bits = np.zeros(num_words, np.uint32)
        if self.guide.reasoning is not None:
            self._state = ReasoningState(self.guide.reasoning, self.guide.max_reasoning_tokens, texts)
        if self._stage != "reasoning":
            self._begin_content()

    @property
    def _stage(self) -> str:
        return "content" if self._state is None else self._state.stage

    def _begin_content(self) -> None:
        self._matcher = None if self._start is None else self._start.copy()

    def advance(self, token_ids: Sequence[int]) -> None:
        """Append tokens of the output, and find out what may follow. Takes time."""
        try:
            for token_id in token_ids:
                self.output.append(token_id)
                self._push(token_id)
            self._prepare()
        except RequestError as error:
            self.fault = error

    def _push(self, token_id: int) -> None:
        """Append one token. An output that may open with reasoning is followed as content too, while it matches."""
        before, added = self._stage, [token_id]
        if self._state is not None:
            self._state.push(token_id)
            if before != "content" and self._state.has_reasoned:
                if self._stage != "content":
                    return
                self._begin_content()
                added = list(self._state.content_ids)
        for each in added:
            self._append(each)

    def _append(self, token_id: int) -> None:
        """Append a token of the content, or of an opening that may yet be content."""
        if token_id in self.eos_ids:
            self._ended = True
        elif self._matcher is not None:
            try:
                self._matcher.consume(token_id)
            except RequestError:
                if self._stage != "opening":
                    raise
                self._matcher = None

    def _prepare(self) -> None:
        """Find out what may follow."""
        self.forced, self.mask = (), None
        if self._stage == "content" and self._start is None:
            self.is_done = True
        elif forced := self._forced():
            if self._jumps:
                self.forced = forced
            else:
                self.mask = self._only(forced[:1])
        elif self._start is not None:
            self.mask = self._allowed()

    def _forced(self) -> tuple[int, ...]:
        if self._stage == "reasoning" and self._state is not None:
            return self._state.forced()
        if self._stage == "content" and self._jumps and not self._ended and self._matcher is not None:
            return tuple(self._matcher.forced()[:MAX_FORCED])
        return ()

    def _allowed(self) -> MaskArray:
        """Return what the grammar allows: in reasoning all but the end of the sequence, behind its end only that."""
        if self._stage == "reasoning":
            self._bits.fill(0xFFFFFFFF)
            self._flip({*self.eos_ids, *self._state.beyond()} if self._state is not None else self.eos_ids)
        elif self._matcher is None:
            self._bits.fill(0)
        elif self._ended or self._matcher.is_complete:
            self._only(self.eos_ids)
        else:
            self._matcher.fill(self._bits)
        token_id = None if self._stage != "opening" or self._state is None else self._state.opening_id
        if token_id is not None:
            self._bits[token_id // 32] |= np.uint32(1 << token_id % 32)
        return self._bits

    def _only(self, token_ids: Iterable[int]) -> MaskArray:
        self._bits.fill(0)
        self._flip(token_ids)
        return self._bits

    def _flip(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            self._bits[token_id // 32] ^= np.uint32(1 << token_id % 32)
