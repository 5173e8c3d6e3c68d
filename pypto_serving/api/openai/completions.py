"""POST /v1/completions."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pypto_serving.api.openai.body import parse_body
from pypto_serving.api.openai.choice import Delta, Output
from pypto_serving.api.openai.fields import COMPLETION_RULES, ignored_header
from pypto_serving.api.openai.generation import Generation, Prompt
from pypto_serving.api.openai.logprobs import completion_logprobs
from pypto_serving.api.openai.params import cache_salt_of, priority_of, sampling_params
from pypto_serving.api.openai.prompts import encode_prompts, fit_max_tokens
from pypto_serving.api.openai.respond import respond
from pypto_serving.api.openai.schemas import CompletionBody
from pypto_serving.api.openai.sse import EventFormat, encode
from pypto_serving.api.service import Service

DEFAULT_MAX_TOKENS = 16


async def create_completion(request: Request) -> Response:
    """Continue one or several prompts."""
    service: Service = request.app.state.service
    body, ignored = await parse_body(request, CompletionBody, COMPLETION_RULES)
    model = service.resolve_model(body.model)
    prompts = await _prompts(service, body)
    generation = Generation(service, prompts, "cmpl")
    usage = bool(body.stream_options and body.stream_options.include_usage)
    form = CompletionFormat(generation.id, int(time.time()), model, len(generation.choices), usage)
    return await respond(request, generation, form, bool(body.stream), ignored_header(ignored))


async def _prompts(service: Service, body: CompletionBody) -> list[Prompt]:
    config = service.engine.config
    params = sampling_params(body, service.serving.default_sampling, config.vocab_size, body.max_tokens, body.logprobs)
    priority, cache_salt = priority_of(body), cache_salt_of(body)
    add_special = body.add_special_tokens is not False
    prompts = []
    for ids in await encode_prompts(service, body.prompt, add_special):
        max_tokens = fit_max_tokens(len(ids), body.max_tokens, DEFAULT_MAX_TOKENS, config.max_model_len)
        prompts.append(Prompt(ids, msgspec.structs.replace(params, max_tokens=max_tokens), priority, cache_salt))
    return prompts


class CompletionFormat(EventFormat):
    """`text_completion` objects."""

    def __init__(self, completion_id: str, created: int, model: str, num_choices: int, include_usage: bool) -> None:
        self._base = {"id": completion_id, "object": "text_completion", "created": created, "model": model}
        super().__init__(self._base, num_choices, b',"text":%b', include_usage)

    def opening(self) -> bytes:
        return b""

    def rare_event(self, delta: Delta) -> bytes:
        middle = b',"text":' + encode(delta.text)
        return self.choice(delta.index, middle, completion_logprobs(delta.logprobs), delta.finish_reason)

    def response(self, outputs: list[Output], usage: dict[str, object]) -> dict[str, Any]:
        choices = [
            {
                "index": output.index,
                "text": output.text,
                "logprobs": completion_logprobs(output.logprobs),
                "finish_reason": output.finish_reason,
            }
            for output in outputs
        ]
        return {**self._base, "choices": choices, "usage": usage}
