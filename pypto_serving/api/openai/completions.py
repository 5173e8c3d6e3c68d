"""Serve POST /v1/completions."""

from __future__ import annotations

import time
import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pypto_serving.api.generation.choice import Delta
from pypto_serving.api.generation.output import Output
from pypto_serving.api.generation.request import GenerationRequest, fit_prompt
from pypto_serving.api.openai.body import parse_body
from pypto_serving.api.openai.fields import COMPLETION_RULES, ignored_header
from pypto_serving.api.openai.logprobs import completion_logprobs
from pypto_serving.api.openai.params import cache_salt_of, priority_of, sampling_params
from pypto_serving.api.openai.prompts import encode_prompts
from pypto_serving.api.openai.respond import respond, submit
from pypto_serving.api.openai.schemas import CompletionBody
from pypto_serving.api.openai.sse import EventFormat, Head, encode
from pypto_serving.api.service import Service
from pypto_serving.types.config import default_of
from pypto_serving.types.sampling import SamplingParams

DEFAULT_MAX_TOKENS = default_of(SamplingParams, "max_tokens")


async def create_completion(request: Request) -> Response:
    """Continue one or several prompts."""
    service: Service = request.app.state.service
    body, ignored = await parse_body(request, CompletionBody, COMPLETION_RULES)
    model = service.resolve_model(body.model)
    wanted = await _generation_request(service, body)
    generation = submit(service, wanted)
    head = Head(generation.id, int(time.time()), model, wanted.num_choices, body.include_usage)
    return await respond(request, generation, CompletionFormat(head), body, ignored_header(ignored))


async def _generation_request(service: Service, body: CompletionBody) -> GenerationRequest:
    params = sampling_params(body, service.serving.default_sampling, body.max_tokens, body.logprobs)
    priority, cache_salt = priority_of(body, service.serving.client_priority), cache_salt_of(body)
    prompts = [
        fit_prompt(ids, params, service.engine.config, default_max_tokens=DEFAULT_MAX_TOKENS)
        for ids in await encode_prompts(service, body.prompt, body.add_special_tokens is not False)
    ]
    return GenerationRequest(f"cmpl-{uuid.uuid4().hex}", prompts, priority, cache_salt)


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
