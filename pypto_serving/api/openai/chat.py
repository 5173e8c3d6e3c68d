"""Serve POST /v1/chat/completions."""

from __future__ import annotations

import uuid

from starlette.requests import Request
from starlette.responses import Response

from pypto_serving.api.common.body import BodySource
from pypto_serving.api.common.respond import respond
from pypto_serving.api.common.sse import Head
from pypto_serving.api.openai.chat_format import ChatFormat, ParsedChatFormat
from pypto_serving.api.service import Service


async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    reading: BodySource = request.app.state.reading
    body = await reading.read(request, "chat")
    wanted = body.generation(f"chatcmpl-{uuid.uuid4().hex}")
    head = Head.of(service, wanted, body.model, body.shown)
    form = ChatFormat(head) if body.new_parser is None else ParsedChatFormat(head, body.new_parser)
    return await respond(request, wanted, form, stream=body.stream, headers=body.headers(), ping_s=body.ping_s)
