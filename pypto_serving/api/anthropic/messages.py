"""Serve POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import uuid

from starlette.requests import Request
from starlette.responses import Response

from pypto_serving.api.anthropic.format import MessageFormat
from pypto_serving.api.common.body import BodySource
from pypto_serving.api.common.respond import respond
from pypto_serving.api.http.errors import ANTHROPIC_ID_HEADER
from pypto_serving.api.openai.tokenize import answer_read

PING_S = 10.0
"""A stream that is silent for so long sends `ping`."""


async def create_message(request: Request) -> Response:
    """Answer a conversation."""
    reading: BodySource = request.app.state.reading
    body = await reading.read(request, "messages")
    wanted = body.generation(f"msg_{uuid.uuid4().hex}")
    cut = wanted.prompts[0].max_tokens != body.params.max_tokens
    form = MessageFormat(wanted.id, body.model, body.new_parser, request.state.request_id, cut)
    headers = body.headers() | {ANTHROPIC_ID_HEADER: request.state.request_id}
    return await respond(request, wanted, form, stream=body.stream, headers=headers, ping_s=PING_S)


async def count_tokens(request: Request) -> Response:
    """Count the tokens of the prompt that a conversation would have."""
    answer = await answer_read(request, "count_tokens")
    answer.headers[ANTHROPIC_ID_HEADER] = request.state.request_id
    return answer
