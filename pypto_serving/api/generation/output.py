"""Collect the deltas of one choice."""

from __future__ import annotations

from pypto_serving.api.generation.choice import Delta
from pypto_serving.api.generation.logprobs import TokenEntry


class Output:
    """Collect all deltas of one choice. `logprobs` and `token_ids` stay None if the request asked for none."""

    __slots__ = ("finish_reason", "index", "logprobs", "stop_reason", "texts", "token_ids")

    def __init__(self, index: int) -> None:
        self.index = index
        self.texts: list[str] = []
        self.logprobs: list[TokenEntry] | None = None
        self.token_ids: list[int] | None = None
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    def add(self, delta: Delta) -> None:
        """Append a delta; deltas come in order."""
        self.texts.append(delta.text)
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.logprobs is not None:
            self.logprobs = [] if self.logprobs is None else self.logprobs
            self.logprobs.extend(delta.logprobs)
        if delta.token_ids is not None:
            self.token_ids = [] if self.token_ids is None else self.token_ids
            self.token_ids.extend(delta.token_ids)

    @property
    def text(self) -> str:
        """Return the whole text."""
        return "".join(self.texts)
