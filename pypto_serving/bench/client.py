"""Send completions to an OpenAI-compatible server, parse its replies, and record when they arrive."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import msgspec

from pypto_serving.bench.datasets import Prompt
from pypto_serving.bench.http import HttpClient
from pypto_serving.bench.metrics import DraftCounters, RequestRecord, parse_draft_counters
from pypto_serving.bench.options import Target
from pypto_serving.errors import PyptoError
from pypto_serving.types.server_url import key_in
from pypto_serving.util import counted, decode_json, parse_json

_TIMEOUT_S = 10.0
_ERROR_TEXT_LIMIT = 300


class BenchmarkError(PyptoError):
    """The server under test does not answer a question that the run depends on."""


class ModelCard(msgspec.Struct):
    """One entry of GET /v1/models. `vocab_size` and `max_model_len` are None if the server does not report them."""

    id: str
    vocab_size: int | None = None
    max_model_len: int | None = None


class _ModelList(msgspec.Struct):
    data: list[ModelCard]


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
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
    """Owns the RequestRecord of one reply. A reply without streaming has only an end-to-end latency.

    Of several choices, the text is that of the first; the time to the next chunk is counted in each.
    Parses bytes with their arrival times; times are seconds of one clock."""

    _decoder = msgspec.json.Decoder(_Chunk)

    def __init__(self, start_s: float, prompt_tokens: int | None, stream: bool = True) -> None:
        first_s = 0.0 if stream else None
        self._record = RequestRecord(prompt_tokens=prompt_tokens or 0, start_s=start_s, ttft_s=first_s)
        self._stream = stream
        self._body = bytearray()  # the body; in a stream with status 2xx, only its unfinished last line
        self._texts: dict[int, list[str]] = {}
        self._last_s: dict[int, float] = {}
        self._ended: set[int] = set()
        self._finished = False
        self._error = ""

    def feed(self, status: int, data: bytes, now_s: float) -> None:
        """Parse a piece of the body that arrived at `now_s`. It may end anywhere in a line."""
        self._body += data
        if not self._stream:
            self._record.latency_s = now_s - self._record.start_s
        elif 200 <= status < 300:
            *lines, self._body = self._body.split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    self._read_event(bytes(line[5:].strip()), now_s)

    def finish(self, status: int) -> RequestRecord:
        """Return the record of a complete reply. It succeeds if its status is 2xx and it has no error."""
        if not 200 <= status < 300:
            return self.fail(f"HTTP {status}: {error_text(self._body)}")
        if self._stream:
            num_chunks = sum(map(len, self._texts.values()))
            self._record.output_tokens = self._record.output_tokens or num_chunks
            if not self._error and not (self._finished or (self._ended and self._ended >= self._texts.keys())):
                chunks = counted(num_chunks, "chunk")
                self._error = f"the stream ended after {chunks}, before finish_reason or [DONE]"
        else:
            self._read_whole()
        if self._error:
            return self.fail(self._error)
        self._record.text = self._text
        return self._record

    def fail(self, error: str) -> RequestRecord:
        """Return the record of a failed request: the error and the text so far, without latencies and output tokens."""
        record = self._record
        return RequestRecord(prompt_tokens=record.prompt_tokens, start_s=record.start_s, text=self._text, error=error)

    @property
    def _text(self) -> str:
        return "".join(self._texts.get(0, ()))

    def _read_event(self, event: bytes, now_s: float) -> None:
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
        for choice in chunk.choices or ():
            self._read_choice(choice, now_s)
        if chunk.usage is not None:
            self._count_tokens(chunk.usage)

    def _read_choice(self, choice: _Choice, now_s: float) -> None:
        record, text = self._record, choice.visible_text()
        has_content = bool(text) or choice.calls_tool()
        if has_content:
            if choice.index in self._last_s:
                record.itls_s.append(now_s - self._last_s[choice.index])
            elif not self._texts:
                record.ttft_s = now_s - record.start_s
            self._last_s[choice.index] = now_s
            self._texts.setdefault(choice.index, []).append(text)
        if has_content or choice.finish_reason:
            record.latency_s = now_s - record.start_s
        if choice.finish_reason:
            self._ended.add(choice.index)
            if not self._texts:
                record.ttft_s = record.latency_s

    def _read_whole(self) -> None:
        try:
            reply = decode_json(self._body, _Chunk)
        except ValueError as error:
            self._error = f"the reply is not what OpenAI sends: {error}: {_shorten(bytes(self._body))}"
            return
        if reply.error or not reply.choices:
            self._error = f"error in the reply: {error_text(self._body)}"
            return
        self._texts[0] = [reply.choices[0].visible_text()]
        if reply.usage is not None:
            self._count_tokens(reply.usage)

    def _count_tokens(self, usage: _Usage) -> None:
        """Record the tokens that the server counted."""
        record, details = self._record, usage.prompt_tokens_details
        record.prompt_tokens = usage.prompt_tokens or record.prompt_tokens
        record.output_tokens = usage.completion_tokens or record.output_tokens
        if details is not None:
            record.cached_tokens = details.cached_tokens
            record.cached_by_tier = details.cached_tokens_by_tier or {}


class ApiClient:
    """Sends prompts to one model of the target. Records failed requests instead of raising."""

    def __init__(self, target: Target, model: str) -> None:
        self._target = target
        self._model = model
        self._http = open_http(target)

    def encode(self, prompt: Prompt) -> bytes:
        """Encode the HTTP request for `prompt`, which must suit the endpoint (`as_messages`, `as_completion`)."""
        target, chat = self._target, self._target.backend == "openai-chat"
        body: dict[str, Any] = {
            "model": self._model,
            "messages" if chat else "prompt": prompt.content,
            "max_completion_tokens" if chat else "max_tokens": prompt.output_len,
            "temperature": target.temperature,
        }
        if target.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if target.ignore_eos:
            body["ignore_eos"] = True
        body |= target.extra_body
        return self._http.encode("POST", target.path, msgspec.json.encode(body))

    async def send(self, request: bytes, prompt_tokens: int | None) -> RequestRecord:
        """Send an encoded request and follow its reply to the end, the first error or the timeout."""
        parser = ReplyParser(time.perf_counter(), prompt_tokens, self._target.stream)
        limit = asyncio.timeout(self._target.timeout_s)
        try:
            async with limit:
                status = await self._http.exchange(
                    request, lambda status, data: parser.feed(status, data, time.perf_counter())
                )
        except OSError as error:
            if limit.expired():
                return parser.fail(f"no complete reply within --timeout {self._target.timeout_s:g} s")
            return parser.fail(f"connection failed: {error}")
        return parser.finish(status)

    def close(self) -> None:
        self._http.close()


async def find_model(target: Target) -> ModelCard:
    """Return the card of `target.model`, or the first that the server lists. Raises BenchmarkError."""
    url = target.url.origin + target.url.target("/v1/models")
    try:
        status, body = await _fetch(target, "/v1/models")
        if not 200 <= status < 300:
            raise BenchmarkError(f"GET {url}: HTTP {status}: {error_text(body)}")
        cards = decode_json(body, _ModelList).data
    except TimeoutError:
        raise BenchmarkError(f"GET {url}: no reply within {_TIMEOUT_S:g} s; is the server up?") from None
    except OSError as error:
        raise BenchmarkError(f"GET {url}: {error}; is the server up, and is its address right?") from None
    except ValueError as error:
        raise BenchmarkError(f"GET {url}: not a list of models: {error}; give --model and --vocab-size") from None
    for card in cards:
        if target.model in (None, card.id):
            return card
    names = ", ".join(card.id for card in cards) or "none"
    raise BenchmarkError(f"GET {url}: does not list {target.model or 'any model'}; it serves: {names}")


async def read_draft_counters(target: Target) -> DraftCounters | None:
    """Return the server's counters of drafts from its metrics; None if it has none."""
    try:
        status, body = await _fetch(target, "/metrics")
    except OSError:
        return None
    return parse_draft_counters(body.decode(errors="replace")) if status == 200 else None


async def _fetch(target: Target, path: str) -> tuple[int, bytearray]:
    """Return status and body of a GET. Raises OSError."""
    http, body = open_http(target), bytearray()
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return await http.exchange(http.encode("GET", path), lambda _, data: body.extend(data)), body
    finally:
        http.close()


def open_http(target: Target) -> HttpClient:
    """Open a client for the target. Send the API key of the environment, if any, as bearer token."""
    key = key_in(os.environ)
    return HttpClient(target.url, {"Authorization": f"Bearer {key}"} if key else {})


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
