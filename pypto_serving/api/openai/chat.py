"""Serve POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid

from starlette.requests import Request
from starlette.responses import Response

from pypto_serving.api.generation.generation import Generation
from pypto_serving.api.generation.request import GenerationRequest
from pypto_serving.api.openai.chat_format import ChatFormat, ParsedChatFormat
from pypto_serving.api.openai.fields import ignored_header
from pypto_serving.api.openai.respond import respond
from pypto_serving.api.openai.sse import Head
from pypto_serving.api.reading.reading import Reading
from pypto_serving.api.service import Service


async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    reading: Reading = request.app.state.reading
    body = await reading.read(request, "chat")
    service.warn_ignored(body.ignored)
    wanted = GenerationRequest(
        f"chatcmpl-{uuid.uuid4().hex}", body.prompts, body.params, body.priority, body.cache_salt
    )
    generation = Generation(service, wanted)
    head = Head(generation.id, int(time.time()), body.model, wanted.num_choices, body.include_usage)
    form = ChatFormat(head) if body.new_parser is None else ParsedChatFormat(head, body.new_parser)
    return await respond(request, generation, form, body, ignored_header(body.ignored))
