"""Serve POST /v1/completions."""

from __future__ import annotations

import uuid

from starlette.requests import Request
from starlette.responses import Response

from pypto_serving.api.common.body import BodySource
from pypto_serving.api.common.respond import respond
from pypto_serving.api.common.sse import Head
from pypto_serving.api.openai.completion_format import CompletionFormat
from pypto_serving.api.openai.echo_format import EchoFormat
from pypto_serving.api.service import Service


async def create_completion(request: Request) -> Response:
    """Continue one or several prompts."""
    service: Service = request.app.state.service
    reading: BodySource = request.app.state.reading
    body = await reading.read(request, "completions")
    wanted = body.generation(f"cmpl-{uuid.uuid4().hex}")
    head = Head.of(service, wanted, body.model, body.shown)
    form = EchoFormat(head) if body.shown.echo else CompletionFormat(head)
    return await respond(request, wanted, form, stream=body.stream, headers=body.headers(), ping_s=body.ping_s)
