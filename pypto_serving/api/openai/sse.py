"""Write choices as server-sent events or as one object; constant parts are encoded once per request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import msgspec

from pypto_serving.api.errors import ApiError
from pypto_serving.api.generation.choice import Delta
from pypto_serving.api.generation.output import Output
from pypto_serving.api.generation.usage import Usage
from pypto_serving.api.openai.usage import usage_object

encode = msgspec.json.encode


def one_line(event: bytes) -> bytes:
    """Escape the characters beyond ASCII at which some clients split lines: U+0085, U+2028 and U+2029."""
    event = event.replace(b"\xc2\x85", b"\\u0085")
    return event.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")


def error_event(error: ApiError) -> bytes:
    """Write the event that ends a stream in which `error` came up."""
    return one_line(b"data: " + error.payload() + b"\n\n")


class Head(msgspec.Struct, frozen=True):
    """The fields that all objects of one response share; `created` is in seconds since the epoch."""

    id: str
    created: int
    model: str
    num_choices: int
    include_usage: bool


class EventFormat(ABC):
    """Write the choices of one response: as events of a stream, or all at once.

    Events are `{**base, "choices": [{"index": i, MIDDLE, "logprobs": ..., "finish_reason": ...}]}`. `around_text` is
    MIDDLE for nothing but text; %b stands for the text. With `include_usage` every event has `"usage": null`, and a
    last event without choices has the usage.
    """

    def __init__(self, head: Head, whole: str, event: str, around_text: bytes) -> None:
        """`whole` and `event` are the values of `object` in a whole response and in an event."""
        self._base = {"id": head.id, "object": whole, "created": head.created, "model": head.model}
        self._head = one_line(b"data: " + encode({**self._base, "object": event})[:-1] + b',"choices":[')
        self._end = b'}],"usage":null}\n\n' if head.include_usage else b"}]}\n\n"
        self._include_usage = head.include_usage
        before, after = around_text.split(b"%b")
        self._before = [b'%b{"index":%d%b' % (self._head, i, before) for i in range(head.num_choices)]
        self._after = after + b',"logprobs":null,"finish_reason":null' + self._end

    def opening(self) -> bytes:
        """Write the events before the first token."""
        return b""

    def event(self, delta: Delta) -> bytes:
        """Write the events of one delta; b"" if it is held back for later."""
        if delta.logprobs is None and delta.finish_reason is None:
            text = encode(delta.text)
            if not delta.text.isascii():
                text = one_line(text)
            return self._before[delta.index] + text + self._after
        return self.rare_event(delta)

    @abstractmethod
    def rare_event(self, delta: Delta) -> bytes:
        """Write the event of a delta with logprobs or a finish reason."""

    def choice(self, index: int, middle: bytes, logprobs: dict[str, Any] | None, finish_reason: str | None) -> bytes:
        """Write any event; `middle` is encoded JSON that begins with a comma."""
        return b'%b{"index":%d%b,"logprobs":%b,"finish_reason":%b%b' % (
            self._head,
            index,
            one_line(middle),
            b"null" if logprobs is None else one_line(encode(logprobs)),
            b"null" if finish_reason is None else encode(finish_reason),
            self._end,
        )

    def usage_event(self, usage: Usage) -> bytes:
        """Write the last event of a stream with include_usage; b"" without."""
        return self._head + b'],"usage":' + encode(usage_object(usage)) + b"}\n\n" if self._include_usage else b""

    def response(self, outputs: list[Output], usage: Usage) -> dict[str, Any]:
        """Write the whole response of a request that does not stream."""
        choices = [self.whole_choice(output) for output in outputs]
        return {**self._base, "choices": choices, "usage": usage_object(usage)}

    @abstractmethod
    def whole_choice(self, output: Output) -> dict[str, Any]:
        """Write one choice of a whole response."""
