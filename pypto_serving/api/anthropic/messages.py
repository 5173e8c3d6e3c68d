"""Serve POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import uuid

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pypto_serving.api.anthropic.format import MessageFormat
from pypto_serving.api.errors import ANTHROPIC_ID_HEADER
from pypto_serving.api.openai.body import BodySource, Endpoint, ReadBody
from pypto_serving.api.respond import respond
from pypto_serving.api.service import Service

PING_S = 10.0
"""A stream that is silent for so long sends `ping`."""


async def create_message(request: Request) -> Response:
    """Answer a conversation."""
    body = await _read(request, "messages")
    wanted = body.generation(f"msg_{uuid.uuid4().hex}")
    cut = wanted.prompts[0].max_tokens != body.params.max_tokens
    form = MessageFormat(wanted.id, body.model, body.new_parser, request.state.request_id, cut)
    return await respond(request, wanted, form, stream=body.stream, headers=_headers(request, body), ping_s=PING_S)


async def count_tokens(request: Request) -> Response:
    """Count the tokens of the prompt that a conversation would have."""
    body = await _read(request, "count_tokens")
    content = msgspec.json.encode({"input_tokens": len(body.prompts[0].token_ids)})
    return Response(content, 200, _headers(request, body), "application/json")


async def _read(request: Request, endpoint: Endpoint) -> ReadBody:
    service: Service = request.app.state.service
    reading: BodySource = request.app.state.reading
    body = await reading.read(request, endpoint)
    service.warn_ignored(body.ignored.names)
    return body


def _headers(request: Request, body: ReadBody) -> dict[str, str]:
    return body.headers() | {ANTHROPIC_ID_HEADER: request.state.request_id}
