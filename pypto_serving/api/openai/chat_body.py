"""Read the body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from pypto_serving.api.chat.messages import read_message
from pypto_serving.api.chat.template import RESERVED
from pypto_serving.api.generation.prompts import Prompter
from pypto_serving.api.generation.request import check_scores, fit_params, fit_prompt
from pypto_serving.api.openai.body import ReadBody, parse_body, read_common
from pypto_serving.api.openai.fields import chat_rules
from pypto_serving.api.openai.params import sampling_params
from pypto_serving.api.openai.schemas import ChatBody
from pypto_serving.api.openai.shown import Shown
from pypto_serving.api.settings import ServingConfig
from pypto_serving.errors import RequestError
from pypto_serving.types.sampling import MAX_LOGPROBS, check_max_tokens


def read_chat(prompter: Prompter, serving: ServingConfig, raw: bytes | bytearray) -> ReadBody:
    """Parse, check, render and encode. Raises RequestError that names the field at fault."""
    encoder = prompter.chat_encoder
    body, ignored = parse_body(raw, ChatBody, chat_rules(encoder.request_fields))
    common = read_common(body, ignored, serving)
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    asked = getattr(body, field)
    check_max_tokens(asked, field, least=1)
    params = sampling_params(body, serving.default_sampling, asked, _num_logprobs(body))
    shown = Shown.of(body, params)
    messages = _messages(body)
    prompter.check_length(sum(len(message["content"]) for message in messages), "messages")
    chat = encoder.encode(messages, _encoder_kwargs(body, encoder.request_fields))
    ids = prompter.encode_chat(chat, bool(body.add_special_tokens))
    keep = params.truncate_prompt_tokens
    prompt = fit_prompt(ids, params.max_tokens, prompter.config, max_tokens_field=field, truncate_to=keep)
    check_scores([prompt], params)
    fitted = fit_params(params, prompter, chat.new_parser)
    return ReadBody(prompts=[prompt], params=fitted, shown=shown, new_parser=chat.new_parser, **common)


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
    sent = {**body.extra, "response_format": body.response_format}
    fields = {name: value for name, value in sent.items() if name in request_fields and value is not None}
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
