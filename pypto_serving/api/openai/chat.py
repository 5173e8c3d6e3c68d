"""Serve POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pypto_serving.api.chat.messages import read_message
from pypto_serving.api.chat.template import RESERVED
from pypto_serving.api.generation.prompts import encode_chat
from pypto_serving.api.generation.request import GenerationRequest, fit_prompt
from pypto_serving.api.openai.body import parse_body
from pypto_serving.api.openai.chat_format import ChatFormat, ParsedChatFormat
from pypto_serving.api.openai.fields import chat_rules, ignored_header
from pypto_serving.api.openai.params import cache_salt_of, priority_of, sampling_params
from pypto_serving.api.openai.respond import respond, submit
from pypto_serving.api.openai.schemas import ChatBody
from pypto_serving.api.openai.sse import Head
from pypto_serving.api.service import Service
from pypto_serving.errors import RequestError
from pypto_serving.types.sampling import MAX_LOGPROBS, check_max_tokens


async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    body, ignored = await parse_body(request, ChatBody, chat_rules(service.chat_encoder.request_fields))
    model = service.resolve_model(body.model)
    wanted = await _generation_request(service, body)
    generation = submit(service, wanted)
    head = Head(generation.id, int(time.time()), model, wanted.num_choices, body.include_usage)
    new_parser = wanted.prompts[0].new_parser
    form = ChatFormat(head) if new_parser is None else ParsedChatFormat(head, new_parser)
    return await respond(request, generation, form, body, ignored_header(ignored))


async def _generation_request(service: Service, body: ChatBody) -> GenerationRequest:
    encoder = service.chat_encoder
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    asked, defaults = getattr(body, field), service.serving.default_sampling
    check_max_tokens(asked, field)
    params = sampling_params(body, defaults, asked, _num_logprobs(body))
    chat = encoder.encode(_messages(body), _encoder_kwargs(body, encoder.request_fields))
    ids = await encode_chat(service, chat, bool(body.add_special_tokens))
    prompt = fit_prompt(ids, params, service.engine.config, max_tokens_field=field, new_parser=chat.new_parser)
    return GenerationRequest(
        f"chatcmpl-{uuid.uuid4().hex}",
        [prompt],
        priority_of(body, service.serving.client_priority),
        cache_salt_of(body),
    )


def _num_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        message = f"top_logprobs is {body.top_logprobs}, but must be between 0 and {MAX_LOGPROBS}"
        raise RequestError(message, param="top_logprobs")
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise RequestError("top_logprobs is only allowed together with logprobs = true", param="top_logprobs")
    return None


def _encoder_kwargs(body: ChatBody, request_fields: frozenset[str]) -> dict[str, Any]:
    given = body.chat_template_kwargs or {}
    if reserved := sorted(RESERVED & given.keys()):
        names = ", ".join(reserved)
        raise RequestError(f"chat_template_kwargs must not set {names}", param="chat_template_kwargs")
    fields = {name: value for name, value in body.extra.items() if name in request_fields and value is not None}
    if twice := sorted(fields.keys() & given.keys()):
        names = ", ".join(twice)
        raise RequestError(f"chat_template_kwargs and the request both have {names}; send one", param=twice[0])
    if body.extra.get("tool_choice") == "none":
        fields.pop("tools", None)
    return {**given, **fields, "add_generation_prompt": body.add_generation_prompt is not False}


def _messages(body: ChatBody) -> list[dict[str, Any]]:
    if not body.messages:
        raise RequestError("messages is an empty list; send at least one message", param="messages")
    given = ({**m.extra, "role": m.role, "content": m.content} for m in body.messages)
    return [read_message(message, f"messages[{i}]") for i, message in enumerate(given)]
