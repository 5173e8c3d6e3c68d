"""Send completions to an OpenAI-compatible server and record when replies arrive."""

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
from pypto_serving.bench.replies import StreamParser, WholeParser, error_text
from pypto_serving.errors import PyptoError
from pypto_serving.types.server_url import key_in
from pypto_serving.util import decode_json

_TIMEOUT_S = 10.0


class BenchmarkError(PyptoError):
    """The server under test does not answer a question that the run depends on."""


class ModelCard(msgspec.Struct):
    """One entry of GET /v1/models. `vocab_size` and `max_model_len` are None if the server does not report them."""

    id: str
    vocab_size: int | None = None
    max_model_len: int | None = None


class _ModelList(msgspec.Struct):
    data: list[ModelCard]


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
        parser = (StreamParser if self._target.stream else WholeParser)(time.perf_counter(), prompt_tokens)
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
    """Return what the server drafted so far, from its metrics; None if it drafts nothing or has no metrics."""
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
