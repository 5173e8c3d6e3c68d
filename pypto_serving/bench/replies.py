"""Parse replies of an OpenAI-compatible server into records: streams, and replies in one piece."""

from __future__ import annotations

from typing import Any

import msgspec

from pypto_serving.bench.metrics import RequestRecord
from pypto_serving.util import counted, decode_json, parse_json

_ERROR_TEXT_LIMIT = 300


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    message: _Delta | None = None
    finish_reason: str | None = None

    def visible_text(self) -> str:
        delta = self.delta or self.message
        if delta is None:
            return self.text or ""
        return delta.content or delta.reasoning_content or delta.reasoning or ""

    def calls_tool(self) -> bool:
        return self.delta is not None and bool(self.delta.tool_calls)


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None
    cached_tokens_by_tier: dict[str, int] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class ReplyParser:
    """Owns the RequestRecord of one reply. Parses bytes with their arrival times and fills the record.

    Times are seconds of one clock. A reply succeeds if its status is 2xx and `_complete` finds no error.
    """

    def __init__(self, start_s: float, prompt_tokens: int | None) -> None:
        self._record = RequestRecord(prompt_tokens=prompt_tokens or 0, start_s=start_s)
        self._body = bytearray()
        self._texts: list[str] = []

    def feed(self, status: int, data: bytes, now_s: float) -> None:
        """Parse a piece of the body that arrived at `now_s`. It may end anywhere in a line."""
        self._body += data

    def finish(self, status: int) -> RequestRecord:
        """Return the record of a complete reply with `status`."""
        error = self._complete() if 200 <= status < 300 else f"HTTP {status}: {error_text(self._body)}"
        if error:
            return self.fail(error)
        self._record.text = "".join(self._texts)
        return self._record

    def fail(self, error: str) -> RequestRecord:
        """Return the record of a failed request: the error and the text so far, without latencies and output tokens."""
        record, text = self._record, "".join(self._texts)
        return RequestRecord(prompt_tokens=record.prompt_tokens, start_s=record.start_s, text=text, error=error)

    def _complete(self) -> str:
        """Fill the record at the end of a reply with status 2xx. Return the error, or an empty text."""
        raise NotImplementedError

    def _count_tokens(self, usage: _Usage) -> None:
        """Record the tokens that the server counted."""
        record, details = self._record, usage.prompt_tokens_details
        record.prompt_tokens = usage.prompt_tokens or record.prompt_tokens
        record.output_tokens = usage.completion_tokens or record.output_tokens
        if details is not None:
            record.cached_tokens = details.cached_tokens
            record.cached_by_tier = details.cached_tokens_by_tier or {}


class StreamParser(ReplyParser):
    """Parses a streamed reply, which ends with a finish_reason or [DONE]. `_body` is the line that has begun."""

    _decoder = msgspec.json.Decoder(_Chunk)

    def __init__(self, start_s: float, prompt_tokens: int | None) -> None:
        super().__init__(start_s, prompt_tokens)
        self._num_chunks = 0
        self._last_s = start_s
        self._finished = False
        self._error = ""

    def feed(self, status: int, data: bytes, now_s: float) -> None:
        super().feed(status, data, now_s)
        if 200 <= status < 300:
            *lines, self._body = self._body.split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    self._event(bytes(line[5:].strip()), now_s)

    def _complete(self) -> str:
        self._record.output_tokens = self._record.output_tokens or self._num_chunks
        if self._error or self._finished:
            return self._error
        return f"the stream ended after {counted(self._num_chunks, 'chunk')}, before finish_reason or [DONE]"

    def _event(self, event: bytes, now_s: float) -> None:
        if event == b"[DONE]":
            self._finished = True
            return
        try:
            chunk = self._decoder.decode(event)
        except (ValueError, RecursionError) as error:
            self._error = self._error or f"a chunk is not what OpenAI sends: {error}: {_shorten(event)}"
            return
        if chunk.error:
            self._error = self._error or f"error in the stream: {_message(chunk.error)}"
        if chunk.choices:
            self._choice(chunk.choices[0], now_s)
        if chunk.usage is not None:
            self._count_tokens(chunk.usage)

    def _choice(self, choice: _Choice, now_s: float) -> None:
        record, text = self._record, choice.visible_text()
        has_content = bool(text) or choice.calls_tool()
        if has_content:
            if self._num_chunks:
                record.itls_s.append(now_s - self._last_s)
            else:
                record.ttft_s = now_s - record.start_s
            self._num_chunks += 1
            self._last_s = now_s
            self._texts.append(text)
        if has_content or choice.finish_reason:
            record.latency_s = now_s - record.start_s
        if choice.finish_reason:
            self._finished = True
            if not self._num_chunks:
                record.ttft_s = record.latency_s


class WholeParser(ReplyParser):
    """Parses a reply that is not streamed; of its latencies only the end-to-end one is known."""

    def __init__(self, start_s: float, prompt_tokens: int | None) -> None:
        super().__init__(start_s, prompt_tokens)
        self._record.ttft_s = None

    def feed(self, status: int, data: bytes, now_s: float) -> None:
        super().feed(status, data, now_s)
        self._record.latency_s = now_s - self._record.start_s

    def _complete(self) -> str:
        try:
            reply = decode_json(self._body, _Chunk)
        except ValueError as error:
            return f"the reply is not what OpenAI sends: {error}: {_shorten(bytes(self._body))}"
        if reply.error or not reply.choices:
            return f"error in the reply: {error_text(self._body)}"
        self._texts.append(reply.choices[0].visible_text())
        if reply.usage is not None:
            self._count_tokens(reply.usage)
        return ""


def error_text(body: bytes | bytearray) -> str:
    try:
        reply = parse_json(body)
    except ValueError:
        return _shorten(bytes(body)) or "empty reply"
    return _message(reply["error"] if isinstance(reply, dict) and "error" in reply else reply)


def _message(error: object) -> str:
    if isinstance(error, dict):
        error = error.get("message") or error
    return _shorten(str(error).encode())


def _shorten(text: bytes) -> str:
    return " ".join(text[:_ERROR_TEXT_LIMIT].decode(errors="replace").split())
