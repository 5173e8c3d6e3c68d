"""Serve POST /v1/completions."""

from __future__ import annotations

import time
import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pypto_serving.api.generation.choice import Delta
from pypto_serving.api.generation.output import Output
from pypto_serving.api.openai.body import BodySource
from pypto_serving.api.openai.logprobs import completion_logprobs
from pypto_serving.api.openai.respond import respond
from pypto_serving.api.openai.sse import EventFormat, Head, encode
from pypto_serving.api.service import Service


async def create_completion(request: Request) -> Response:
    """Continue one or several prompts."""
    service: Service = request.app.state.service
    reading: BodySource = request.app.state.reading
    body = await reading.read(request, "completions")
    service.warn_ignored(body.ignored.names)
    wanted = body.generation(f"cmpl-{uuid.uuid4().hex}")
    head = Head(wanted.id, int(time.time()), body.model, wanted.num_choices, body.include_usage)
    form = CompletionFormat(head)
    return await respond(request, wanted, form, body)


class CompletionFormat(EventFormat):
    """Write `text_completion` objects."""

    def __init__(self, head: Head) -> None:
        super().__init__(head, "text_completion", "text_completion", b',"text":%b')

    def rare_event(self, delta: Delta) -> bytes:
        middle = b',"text":' + encode(delta.text)
        return self.choice(delta.index, middle, completion_logprobs(delta.logprobs), delta.finish_reason)

    def whole_choice(self, output: Output) -> dict[str, Any]:
        return {
            "index": output.index,
            "text": output.text,
            "logprobs": completion_logprobs(output.logprobs),
            "finish_reason": output.finish_reason,
        }
