"""Read the body of POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pypto_serving.api.chat.messages import read_message
from pypto_serving.api.chat.tools import read_tool_use
from pypto_serving.api.common.body import ReadBody
from pypto_serving.api.generation.chat_request import ChatRequest, fit_chat
from pypto_serving.api.openai.params import parse_body, read_common, read_shown, sampling_params
from pypto_serving.api.openai.schemas import ChatBody, ChatMessage, ChatPromptBody
from pypto_serving.api.prompting.prompts import Prompter
from pypto_serving.api.prompting.template import RESERVED
from pypto_serving.api.settings import ServingConfig
from pypto_serving.errors import RequestError
from pypto_serving.types.sampling import MAX_LOGPROBS, check_max_tokens

_ENCODED = ("add_generation_prompt", "continue_final_message", "chat_template", "documents", "reasoning_effort")
"""Fields that the encoder takes besides messages and tools."""


def read_chat(prompter: Prompter, serving: ServingConfig, raw: bytes | bytearray) -> ReadBody:
    """Parse, check, render and encode. Raises RequestError that names the field at fault."""
    encoder = prompter.chat_encoder
    body, ignored = parse_body(raw, ChatBody, encoder.request_fields)
    common = read_common(body, ignored, serving)
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    asked = getattr(body, field)
    check_max_tokens(asked, field, least=1)
    params = sampling_params(body, serving.default_sampling, asked, _num_logprobs(body))
    shown = read_shown(body, params)
    tools = read_tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
    chat = ChatRequest(
        messages=read_history(body.messages),
        kwargs=encoder_kwargs(body, encoder.request_fields, serving.trust_request_chat_template),
        params=params,
        tools=tools,
        max_tokens=asked,
        max_tokens_field=field,
        default_max_tokens=serving.default_sampling.max_tokens,
        add_special_tokens=bool(body.add_special_tokens),
        thinking_budget=body.thinking_token_budget,
        hides_reasoning=body.include_reasoning is False,
        stream=bool(body.stream),
    )
    prompt, fitted, form = fit_chat(prompter, chat)
    return ReadBody(prompts=[prompt], params=fitted, shown=shown, new_parser=form, **common)


def _num_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        message = f"top_logprobs is {body.top_logprobs}, but must be between 0 and {MAX_LOGPROBS}"
        raise RequestError(message, param="top_logprobs")
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise RequestError("top_logprobs is only allowed together with logprobs = true", param="top_logprobs")
    return None


def encoder_kwargs(body: ChatPromptBody, request_fields: frozenset[str], trusts_templates: bool) -> dict[str, Any]:
    """Return what ChatEncoder.encode takes besides the messages and tools. Raises RequestError."""
    if body.chat_template is not None and not trusts_templates:
        message = "chat_template is refused: this server runs without the option trust-request-chat-template"
        raise RequestError(message, param="chat_template", code="unsupported_field")
    given = body.chat_template_kwargs or {}
    if reserved := sorted(RESERVED & given.keys()):
        names = ", ".join(reserved)
        raise RequestError(f"chat_template_kwargs must not set {names}", param="chat_template_kwargs")
    sent = {**body.extra, "response_format": body.response_format}
    fields = {name: value for name, value in sent.items() if name in request_fields}
    fields |= {name: getattr(body, name) for name in _ENCODED}
    fields = {name: value for name, value in fields.items() if value is not None}
    if twice := sorted(fields.keys() & given.keys()):
        names = ", ".join(twice)
        raise RequestError(f"chat_template_kwargs and the request both have {names}; send one", param=twice[0])
    return {**given, **fields}


def read_history(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages as ChatEncoder.encode takes them. Raises RequestError."""
    if not messages:
        raise RequestError("messages is an empty list; send at least one message", param="messages")
    given = ({**m.extra, "role": m.role, "content": m.content} for m in messages)
    return [read_message(message, f"messages[{i}]") for i, message in enumerate(given)]
