"""Read the bodies of POST /v1/messages and /v1/messages/count_tokens. Raises RequestError that names the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from pypto_serving.api.anthropic.answers import TokenCount
from pypto_serving.api.anthropic.history import read_history
from pypto_serving.api.anthropic.schemas import CountTokensBody, MessagesBody
from pypto_serving.api.anthropic.tools import read_tool_use
from pypto_serving.api.chat.tools import check_effort, refuse
from pypto_serving.api.common.body import Answered, IgnoredFields, ReadBody, Shown, parse_json
from pypto_serving.api.generation.chat_request import ChatRequest, encode_chat, fit_chat
from pypto_serving.api.prompting.prompts import Prompter
from pypto_serving.api.settings import ServingConfig
from pypto_serving.errors import RequestError
from pypto_serving.types.sampling import INT32_MAX, SamplingParams, check_max_tokens, check_stops
from pypto_serving.types.structured import StructuredOutputsParams
from pypto_serving.util import brief

_SAMPLING = ("temperature", "top_p", "top_k")


class Thought(NamedTuple):
    """Whether the model thinks, for how many tokens at most, and whether the answer leaves that out."""

    on: bool = False
    budget: int | None = None
    hidden: bool = False


def read_messages(prompter: Prompter, serving: ServingConfig, raw: bytes | bytearray) -> ReadBody:
    """Parse, check, render and encode. An output ends with the context, if that is before `max_tokens`."""
    body = parse_json(raw, MessagesBody)
    check_max_tokens(body.max_tokens)
    given = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    check_stops(body.stop_sequences or (), "stop_sequences")
    params = SamplingParams(
        **{**serving.default_sampling.given(), **given},
        stop=tuple(body.stop_sequences or ()),
        max_tokens=body.max_tokens,
        structured_outputs=_structure(body),
    )
    chat = _chat(prompter, body, params)
    if chat.thinking_budget is not None and chat.thinking_budget >= body.max_tokens:
        complaint = f"is {chat.thinking_budget}, but must be less than max_tokens, which is {body.max_tokens}"
        refuse("thinking.budget_tokens", complaint)
    prompt, fitted, form = fit_chat(prompter, chat)
    return ReadBody(
        model=serving.resolve_model(body.model),
        stream=bool(body.stream),
        ping_s=None,
        ignored=IgnoredFields.of(body.unknown_fields()),
        shown=Shown(),
        prompts=[prompt],
        params=fitted,
        new_parser=form,
        priority=0,
        cache_salt="",
    )


def read_count_tokens(prompter: Prompter, serving: ServingConfig, raw: bytes | bytearray) -> Answered:
    """Parse, check, render, encode and count; the prompt may be longer than the context."""
    body = parse_json(raw, CountTokensBody)
    token_ids, _ = encode_chat(prompter, _chat(prompter, body, SamplingParams()))
    serving.resolve_model(body.model)
    return Answered(IgnoredFields.of(body.unknown_fields()), msgspec.json.encode(TokenCount(len(token_ids))))


def _chat(prompter: Prompter, body: CountTokensBody, params: SamplingParams) -> ChatRequest:
    if body.thread is not None:
        message = "thread is not supported: this server keeps no conversations; send all messages instead"
        raise RequestError(message, param="thread", code="thread_unsupported_request")
    thought = _thought(body.thinking)
    history = read_history(body.system, body.messages)
    if not history or history[-1]["role"] == "system":
        refuse("messages", "have nothing to answer; send a user's message with content")
    return ChatRequest(
        messages=history,
        kwargs=_encoder_kwargs(body, thought, prompter.chat_encoder.request_fields) | _continuing(history),
        params=params,
        tools=read_tool_use(body.tools, body.tool_choice),
        default_max_tokens=params.max_tokens,
        thinking_budget=thought.budget,
        hides_reasoning=thought.hidden,
    )


def _continuing(history: list[dict[str, Any]]) -> dict[str, Any]:
    """Have an answer continued that the client began."""
    last = history[-1]
    if last["role"] != "assistant":
        return {}
    if not last["content"] or last.get("tool_calls"):
        refuse("messages", "end with the assistant, but not with text to continue; send results or a user's message")
    return {"continue_final_message": True}


def _encoder_kwargs(body: CountTokensBody, thought: Thought, request_fields: frozenset[str]) -> dict[str, Any]:
    """Return the switches of the model's reasoning, under both names that templates have, and what it should show."""
    kwargs: dict[str, Any] = {"enable_thinking": thought.on, "thinking": thought.on}
    config = _output_config(body)
    if config.get("effort") is not None:
        kwargs["reasoning_effort"] = config["effort"]
    if config.get("format") is not None and "response_format" in request_fields:
        kwargs["response_format"] = {"type": "json_schema", "json_schema": {"schema": config["format"]["schema"]}}
    return kwargs


def _thought(thinking: Any) -> Thought:
    """Read `thinking`; without it the model does not think, if it can be told so."""
    if thinking is None:
        return Thought()
    kind = thinking.get("type") if isinstance(thinking, Mapping) else None
    if kind not in ("enabled", "adaptive", "disabled"):
        refuse("thinking", f"is {brief(thinking)}, but must be an object of type 'enabled', 'adaptive' or 'disabled'")
    budget, display = thinking.get("budget_tokens"), thinking.get("display")
    if budget is not None and (type(budget) is not int or not 0 < budget <= INT32_MAX):
        refuse("thinking.budget_tokens", f"is {brief(budget)}, but must be between 1 and {INT32_MAX}")
    if display not in (None, "summarized", "omitted"):
        refuse("thinking.display", f"is {brief(display)}, but must be 'summarized' or 'omitted'")
    return Thought(kind != "disabled", budget if kind == "enabled" else None, display == "omitted")


def _output_config(body: CountTokensBody) -> Mapping[str, Any]:
    config = {} if body.output_config is None else body.output_config
    if not isinstance(config, Mapping):
        refuse("output_config", f"is {brief(config)}, but must be an object")
    check_effort(config.get("effort"), "output_config.effort")
    form = config.get("format")
    if form is not None:
        schema = form.get("schema") if isinstance(form, Mapping) and form.get("type") == "json_schema" else None
        if not isinstance(schema, Mapping):
            allowed = "{'type': 'json_schema', 'schema': {...}}"
            refuse("output_config.format", f"is {brief(form)}, but must be {allowed}")
    return config


def _structure(body: MessagesBody) -> StructuredOutputsParams | None:
    form = _output_config(body).get("format")
    return None if form is None else StructuredOutputsParams.read({"json": form["schema"]}, "output_config")
