"""RowGuide: determine the next tokens that a row with a guide may choose."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pypto_serving.errors import RequestError
from pypto_serving.guidance import Matcher
from pypto_serving.types.guide import Guide
from pypto_serving.types.sampler import MaskArray
from pypto_serving.worker.reasoning import ReasoningState, TokenTexts

MAX_FORCED = 128
"""Limit of tokens that a row appends at once."""


class NextTokens(NamedTuple):
    """The tokens that a row may append next.

    - `forced`: tokens that must follow, to be appended without sampling.
    - `expected`: tokens that must follow, to be sampled one by one.
    - `mask`: the allowed tokens, or None for all. Only valid until its owner works for another row.
    - `is_done`: there are no restrictions any more.
    """

    forced: tuple[int, ...] = ()
    mask: MaskArray | None = None
    is_done: bool = False
    expected: tuple[int, ...] = ()

    def allows(self, token_id: int) -> bool:
        """Return whether `token_id` may be appended."""
        if self.forced:
            return token_id == self.forced[0]
        return self.mask is None or bool(self.mask[token_id // 32] >> np.uint32(token_id % 32) & np.uint32(1))


class RowGuide:
    """Follows the output of one row.

    Its choices depend only on the guide and the output tokens. A matcher limits the work of each call, so calls are
    made in the same order whether tokens come one by one or, after a restart, all at once.

    - `matcher` is at the beginning of the content; None without a grammar.
    - `bits`: memory for masks. Rows may share it.
    - `texts`: the texts of all tokens.
    - `jumps`: append forced tokens all at once; else they are sampled one by one.
    """

    def __init__(
        self,
        guide: Guide,
        eos_ids: Sequence[int],
        matcher: Matcher | None,
        bits: MaskArray,
        jumps: bool,
        texts: TokenTexts,
    ) -> None:
        self._eos_ids = eos_ids
        self._bits = bits
        self._jumps = jumps
        self._state: ReasoningState | None = None
        if guide.reasoning is not None:
            self._state = ReasoningState(guide.reasoning, guide.max_reasoning_tokens, texts)
        self._has_grammar = matcher is not None
        self._matcher = matcher
        self._content: Matcher | None = None
        """The matcher at the beginning of the content, if the output may still open with reasoning."""
        if matcher is not None and self._stage == "opening":
            self._content = matcher.copy()
        self._ended = False
        self._forced: deque[int] = deque()
        self._mask: MaskArray | None = None

    @property
    def _stage(self) -> str:
        return "content" if self._state is None else self._state.stage

    def open(self) -> None:
        """Determine the choice of the first token. Slow. Raises RequestError."""
        self._prepare()

    def append(self, token_id: int) -> None:
        """Append a token of the output. Slow. Raises RequestError."""
        if self._forced and self._forced[0] == token_id:
            self._forced.popleft()
        else:
            self._forced.clear()
        self._push(token_id)
        if not self._forced:
            self._prepare()

    def choice(self) -> NextTokens:
        """Return the tokens that may follow."""
        if self._stage == "content" and not self._has_grammar:
            return NextTokens(is_done=True)
        if self._forced:
            forced = tuple(self._forced)
            return NextTokens(forced) if self._jumps else NextTokens(mask=self._only(forced[:1]), expected=forced)
        return NextTokens(mask=self._mask)

    def look_ahead(self, drafts: Sequence[int], masks: MaskArray) -> Iterator[int]:
        """Write the mask after drafts[: i + 1] to masks[i + 1], as far as the drafts match; yield i + 1 after each.

        masks[0] is the mask of the last choice, if it has one. Does not change the guide. Slow.
        """
        if self._ended or self._stage == "opening":
            return
        choice, copied = self.choice(), self._copy()
        if choice.mask is not None:
            choice = NextTokens(mask=masks[0])
        for i, token_id in enumerate(drafts):
            if copied._ended or not choice.allows(token_id):
                return
            try:
                copied.append(token_id)
            except RequestError:  # a limit that the row itself may never reach
                return
            choice = copied.choice()
            if choice.forced:
                choice = NextTokens(mask=copied._only(choice.forced[:1]))
            masks[i + 1] = 0xFFFFFFFF if choice.mask is None else choice.mask[: masks.shape[1]]
            yield i + 1

    def _copy(self) -> RowGuide:
        """Return a copy of this guide with the same memory for masks."""
        copied = copy.copy(self)
        copied._forced = self._forced.copy()
        copied._state = None if self._state is None else self._state.copy()
        copied._matcher = None if self._matcher is None else self._matcher.copy()
        return copied

    def _push(self, token_id: int) -> None:
        """Append one token. While an output may still open with reasoning, also follow it as content if it matches."""
        before, added = self._stage, [token_id]
        if self._state is not None:
            self._state.push(token_id)
            if before != "content" and self._state.has_reasoned:
                if before == "opening":
                    self._matcher = self._content
                if self._stage != "content":
                    return
                added = list(self._state.content_ids)
        for each in added:
            self._append(each)

    def _append(self, token_id: int) -> None:
        """Append a token of the content, or of an opening that may turn out to be content."""
        if token_id in self._eos_ids:
            self._ended = True
        elif self._matcher is not None:
            try:
                self._matcher.consume(token_id)
            except RequestError:
                if self._stage != "opening":
                    raise
                self._matcher = None

    def _prepare(self) -> None:
        """Compute the next choice."""
        self._mask = None
        self._forced.extend(self._find_forced())
        if not self._forced and self._has_grammar:
            self._mask = self._allowed()

    def _find_forced(self) -> Sequence[int]:
        if self._stage == "reasoning" and self._state is not None:
            return self._state.forced()
        if self._stage == "content" and not self._ended and self._matcher is not None:
            return self._matcher.forced()[:MAX_FORCED]
        return ()

    def _allowed(self) -> MaskArray:
        """Return the allowed tokens: in reasoning, all but end-of-sequence ones; after the grammar, only these."""
        if self._stage == "reasoning":
            self._bits.fill(0xFFFFFFFF)
            self._flip({*self._eos_ids, *self._state.beyond()} if self._state is not None else self._eos_ids)
        elif self._matcher is None:
            self._bits.fill(0)
        elif self._ended or self._matcher.is_complete:
            self._only(self._eos_ids)
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
