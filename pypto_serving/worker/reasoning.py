"""ReasoningState: tell the reasoning of an output from its content."""

from __future__ import annotations

from typing import Literal

from pypto_serving.types.guide import Reasoning

Stage = Literal["opening", "reasoning", "content"]


class ReasoningState:
    """Where an output stands, from its tokens alone; see Reasoning. Owned by a RowGuide.

    opening      all tokens so far are the beginning of `begin_ids`
    reasoning    `end_ids` are still to come
    content      the rest
    """

    def __init__(self, reasoning: Reasoning, max_tokens: int | None) -> None:
        self.stage: Stage = "opening" if reasoning.begin_ids else "reasoning"
        self._begin = reasoning.begin_ids
        self._end = reasoning.end_ids
        self._max_tokens = max_tokens
        self._opened = 0
        self._num_tokens = 0
        self._tail: tuple[int, ...] = ()

    def push(self, token_id: int) -> None:
        """Append a token."""
        if self.stage == "opening":
            if token_id != self.opening_id:
                self.stage = "content"
                return
            self._opened += 1
            if self._opened == len(self._begin):
                self.stage = "reasoning"
        elif self.stage == "reasoning":
            self._num_tokens += 1
            self._tail = (*self._tail, token_id)[-len(self._end) :]
            if self._tail == self._end:
                self.stage = "content"

    @property
    def opening_id(self) -> int:
        """Return the next token of `begin_ids`, while the stage is `opening`."""
        return self._begin[self._opened]

    def forced(self) -> tuple[int, ...]:
        """Return what must follow: what is missing of `end_ids` once the reasoning has its most tokens."""
        if self.stage != "reasoning" or self._max_tokens is None or self._num_tokens < self._max_tokens:
            return ()
        for length in range(min(len(self._tail), len(self._end) - 1), 0, -1):
            if self._tail[-length:] == self._end[:length]:
                return self._end[length:]
        return self._end
