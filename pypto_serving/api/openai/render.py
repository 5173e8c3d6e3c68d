"""Serve POST /v1/completions/render and /v1/chat/completions/render: what the engine would get."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pypto_serving.api.common.body import BodySource, Generating, ReadBody, check_num_answered
from pypto_serving.api.generation.request import GenerationRequest
from pypto_serving.errors import RequestError

IDS_AT_ONCE = 1 << 14
"""Token ids that are written in a thread before others have their turn."""
MAX_RENDERED_BYTES = 32 << 20


async def render_completion(request: Request) -> Response:
    """Answer with one engine request for each prompt."""
    body, requests = await _render(request, "completions", "cmpl", "prompt")
    return Response(b"[" + b",".join(requests) + b"]", 200, body.headers(), "application/json")


async def render_chat_completion(request: Request) -> Response:
    """Answer with the engine request of a chat."""
    body, [content] = await _render(request, "chat", "chatcmpl", "messages")
    return Response(content, 200, body.headers(), "application/json")


async def _render(request: Request, endpoint: Generating, prefix: str, field: str) -> tuple[ReadBody, list[bytes]]:
    reading: BodySource = request.app.state.reading
    body = await reading.read(request, endpoint)
    wanted = body.generation(f"{prefix}-{uuid.uuid4().hex}")
    check_num_answered(sum(len(prompt.token_ids) for prompt in wanted.prompts), field)
    return body, await asyncio.to_thread(_write_all, body, wanted, field)


def _write_all(body: ReadBody, wanted: GenerationRequest, field: str) -> list[bytes]:
    """Write all prompts. Raises RequestError above MAX_RENDERED_BYTES: each one repeats the parameters."""
    written, num_bytes = [], 0
    for number in range(len(wanted.prompts)):
        written.append(_write(body, wanted, number))
        num_bytes += len(written[-1])
        if num_bytes > MAX_RENDERED_BYTES:
            message = (
                f"the answer would have more than {MAX_RENDERED_BYTES} bytes; send fewer prompts, or a short grammar"
            )
            raise RequestError(message, param=field)
    return written


def _write(body: ReadBody, wanted: GenerationRequest, number: int) -> bytes:
    """Write the RenderedRequest of a prompt, with the id of its first choice."""
    prompt = wanted.prompts[number]
    ids = prompt.token_ids
    pieces = (msgspec.json.encode([*ids[at : at + IDS_AT_ONCE]])[1:-1] for at in range(0, len(ids), IDS_AT_ONCE))
    return msgspec.json.encode(
        {
            "request_id": f"{wanted.id}-{number * wanted.params.n}",
            "token_ids": _joined(pieces),
            "sampling_params": _named(wanted.params) | {"max_tokens": prompt.max_tokens},
            "model": body.model,
            "stream": body.stream,
            "cache_salt": wanted.cache_salt or None,
            "priority": wanted.priority,
        }
    )


def _named(value: msgspec.Struct) -> dict[str, Any]:
    """Return a struct, and those in it, as objects with names."""
    fields = msgspec.structs.asdict(value).items()
    return {name: _named(each) if isinstance(each, msgspec.Struct) else each for name, each in fields}


def _joined(pieces: Iterable[bytes]) -> msgspec.Raw:
    return msgspec.Raw(b"[" + b",".join(pieces) + b"]")
