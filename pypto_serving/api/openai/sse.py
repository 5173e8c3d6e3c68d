"""Server-sent events whose constant parts are encoded once per request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import msgspec

from pypto_serving.api.openai.choice import Delta, Output

encode = msgspec.json.encode


class EventFormat(ABC):
    """How an endpoint writes choices: as events of a stream, or all at once.

    Events are `{**base, "choices": [{"index": i, MIDDLE, "logprobs": ..., "finish_reason": ...}]}`.
    `around_text` is MIDDLE where there is nothing but text, which %b stands for. With `include_usage` every event has
    `"usage": null`, and the last one, without choices, has the usage.
    """

    def __init__(self, base: dict[str, Any], num_choices: int, around_text: bytes, include_usage: bool) -> None:
        self._head = b"data: " + encode(base)[:-1] + b',"choices":['
        self._end = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self._include_usage = include_usage
        before, after = around_text.split(b"%b")
        self._before = [b'%b{"index":%d%b' % (self._head, i, before) for i in range(num_choices)]
        self._after = after + b',"logprobs":null,"finish_reason":null' + self._end

    @abstractmethod
    def opening(self) -> bytes:
        """Events before the first token."""

    def event(self, delta: Delta) -> bytes:
        """The events of one delta; b"" where it is kept for later."""
        if delta.logprobs is None and delta.finish_reason is None:
            return self._before[delta.index] + encode(delta.text) + self._after
        return self.rare_event(delta)

    @abstractmethod
    def response(self, outputs: list[Output], usage: dict[str, object]) -> dict[str, Any]:
        """The whole answer of a request that does not stream."""

    @abstractmethod
    def rare_event(self, delta: Delta) -> bytes:
        """The event of a delta with more than a text."""

    def choice(self, index: int, middle: bytes, logprobs: dict[str, Any] | None, finish_reason: str | None) -> bytes:
        """Any event; `middle` is encoded JSON that begins with a comma."""
        return b'%b{"index":%d%b,"logprobs":%b,"finish_reason":%b%b' % (
            self._head,
            index,
            middle,
            b"null" if logprobs is None else encode(logprobs),
            b"null" if finish_reason is None else encode(finish_reason),
            self._end,
        )

    def usage_event(self, usage: dict[str, object]) -> bytes:
        """The event that ends a stream with include_usage, b"" without."""
        return self._head + b'],"usage":' + encode(usage) + b"}\n\n" if self._include_usage else b""
