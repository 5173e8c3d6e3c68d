"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pypto_serving.api.chat.template import RESERVED
from pypto_serving.api.openai.body import parse_body
from pypto_serving.api.openai.choice import Delta
from pypto_serving.api.openai.fields import CHAT_RULES, brief, ignored_header
from pypto_serving.api.openai.generation import Generation, Prompt
from pypto_serving.api.openai.logprobs import chat_logprobs
from pypto_serving.api.openai.params import sampling_params
from pypto_serving.api.openai.prompts import check_ids, encode_text, fit_max_tokens
from pypto_serving.api.openai.respond import Output, respond
from pypto_serving.api.openai.schemas import ChatBody, ChatMessage
from pypto_serving.api.openai.sse import EventFormat, encode
from pypto_serving.api.service import Service
from pypto_serving.errors import RequestError
from pypto_serving.types.sampling import MAX_LOGPROBS

_MAY_LACK_CONTENT = frozenset({"assistant", "tool", "function"})


async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    body, ignored = await parse_body(request, ChatBody, CHAT_RULES)
    model = service.resolve_model(body.model)
    prompt = await _prompt(service, body)
    generation = Generation(service, [prompt], "chatcmpl")
    usage = bool(body.stream_options and body.stream_options.include_usage)
    form = ChatFormat(generation.id, int(time.time()), model, prompt.params.n, usage)
    return await respond(request, generation, form, bool(body.stream), ignored_header(ignored))


async def _prompt(service: Service, body: ChatBody) -> Prompt:
    config = service.engine.config
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    explicit = getattr(body, name)
    defaults = service.serving.default_sampling
    params = sampling_params(body, defaults, config.vocab_size, explicit, _num_logprobs(body))
    written = service.chat_encoder.encode(_messages(body), _template_kwargs(body))
    if isinstance(written, str):
        ids = await encode_text(service, written, "messages", bool(body.add_special_tokens))
    else:
        ids = check_ids(service, written, "messages")
    max_tokens = fit_max_tokens(len(ids), explicit, None, config.max_model_len, name)
    return Prompt(ids, msgspec.structs.replace(params, max_tokens=max_tokens))


def _num_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        message = f"top_logprobs is {body.top_logprobs}, but must be between 0 and {MAX_LOGPROBS}"
        raise RequestError(message, param="top_logprobs")
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise RequestError("top_logprobs is only allowed together with logprobs = true", param="top_logprobs")
    return None


def _template_kwargs(body: ChatBody) -> dict[str, Any]:
    given = body.chat_template_kwargs or {}
    if reserved := sorted(RESERVED & given.keys()):
        names = ", ".join(reserved)
        raise RequestError(f"chat_template_kwargs must not set {names}", param="chat_template_kwargs")
    return {**given, "add_generation_prompt": body.add_generation_prompt is not False}


def _messages(body: ChatBody) -> list[dict[str, Any]]:
    if not body.messages:
        raise RequestError("messages is an empty list; send at least one message", param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(body.messages)]


def _message(message: ChatMessage, where: str) -> dict[str, Any]:
    """The message as templates read it: `content` is always a string."""
    content = message.content
    if content is None and message.role not in _MAY_LACK_CONTENT:
        raise RequestError(f"{where}.content is missing; send a string", param=f"{where}.content", code="missing_field")
    if isinstance(content, list):
        content = "\n".join(_part_text(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    if not isinstance(content, str | None):
        message_text = f"{where}.content is {brief(content)}, but must be a string or a list of text parts"
        raise RequestError(message_text, param=f"{where}.content", code="invalid_type")
    return {**message.extra, "role": message.role, "content": content or ""}


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else part
    message = f"{where} is a part of type {brief(kind)}; this model reads only parts {{'type': 'text', 'text': ...}}"
    raise RequestError(message, param=where, code="unsupported_content")


class ChatFormat(EventFormat):
    """`chat.completion` objects and chunks; see Format."""

    def __init__(self, chat_id: str, created: int, model: str, num_choices: int, include_usage: bool) -> None:
        self._base = {"id": chat_id, "object": "chat.completion", "created": created, "model": model}
        base = {**self._base, "object": "chat.completion.chunk"}
        super().__init__(base, num_choices, b',"delta":{"content":%b}', include_usage)
        self._num_choices = num_choices

    def opening(self) -> bytes:
        role = b',"delta":{"role":"assistant","content":""}'
        return b"".join(self.choice(i, role, None, None) for i in range(self._num_choices))

    def rare_event(self, delta: Delta) -> bytes:
        content = b',"delta":{"content":' + encode(delta.text) + b"}" if delta.text else b',"delta":{}'
        return self.choice(delta.index, content, chat_logprobs(delta.logprobs), delta.finish_reason)

    def response(self, outputs: list[Output], usage: dict[str, object]) -> dict[str, Any]:
        choices = [
            {
                "index": output.index,
                "message": {"role": "assistant", "content": output.text, "refusal": None},
                "logprobs": chat_logprobs(output.logprobs),
                "finish_reason": output.finish_reason,
            }
            for output in outputs
        ]
        return {**self._base, "choices": choices, "usage": usage}
