"""Collect the deltas of one choice."""

from __future__ import annotations

from pypto_serving.api.generation.choice import Delta
from pypto_serving.api.generation.logprobs import TokenEntry


class Output:
    """Collect all deltas of one choice. `logprobs` stays None if the request asked for none."""

    __slots__ = ("finish_reason", "index", "logprobs", "texts")

    def __init__(self, index: int) -> None:
        self.index = index
        self.texts: list[str] = []
        self.logprobs: list[TokenEntry] | None = None
        self.finish_reason: str | None = None

    def add(self, delta: Delta) -> None:
        """Append a delta; deltas come in order."""
        self.texts.append(delta.text)
        self.finish_reason = delta.finish_reason
        if delta.logprobs is not None:
            self.logprobs = [] if self.logprobs is None else self.logprobs
            self.logprobs.extend(delta.logprobs)

    @property
    def text(self) -> str:
        """Return the whole text."""
        return "".join(self.texts)
