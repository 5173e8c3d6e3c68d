"""Server-sent events whose constant parts are encoded once per request."""

from __future__ import annotations

from typing import Any

import msgspec

_encode = msgspec.json.encode


class EventFrame:
    """Writes `{**base, "choices": [{"index": i, MIDDLE, "logprobs": ..., "finish_reason": ...}]}` events.

    With `include_usage` every event has `"usage": null`, and the last one, without choices, has the usage.
    """

    __slots__ = ("_end", "_head", "_include_usage")

    def __init__(self, base: dict[str, Any], include_usage: bool) -> None:
        self._head = b"data: " + _encode(base)[:-1] + b',"choices":['
        self._end = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self._include_usage = include_usage

    def choice(self, index: int, middle: bytes, logprobs: dict[str, Any] | None, finish_reason: str | None) -> bytes:
        """One event; `middle` is encoded JSON that begins with a comma."""
        return b'%b{"index":%d%b,"logprobs":%b,"finish_reason":%b%b' % (
            self._head,
            index,
            middle,
            b"null" if logprobs is None else _encode(logprobs),
            b"null" if finish_reason is None else _encode(finish_reason),
            self._end,
        )

    def usage(self, usage: dict[str, object]) -> bytes:
        """The event with the usage, b"" where it was not asked for."""
        return self._head + b'],"usage":' + _encode(usage) + b"}\n\n" if self._include_usage else b""
