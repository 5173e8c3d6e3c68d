"""Read the bodies of POST /v1/messages and /v1/messages/count_tokens. Raises RequestError that names the field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec
from pydantic import Field, WithJsonSchema

from pypto_serving.api.anthropic.answers import TokenCount
from pypto_serving.api.anthropic.history import read_history, read_tool_use
from pypto_serving.api.chat.leaving_out import LeftOut
from pypto_serving.api.chat.tools import EFFORTS, MAX_NAME_CHARS, MAX_TOOLS, NAME, check_effort, refuse
from pypto_serving.api.common.body import (
    MAX_MESSAGES,
    Answered,
    Body,
    FieldRules,
    IgnoredFields,
    ReadBody,
    Shown,
    by_type,
    keys,
    parse_json,
)
from pypto_serving.api.common.described import (
    ABOVE_0_TO_1,
    FLAG,
    MAY_TEXT,
    OBJECT,
    TEXT,
    list_of,
    number,
    object_of,
    or_null,
    typed,
    whole,
)
from pypto_serving.api.generation.request import ChatRequest, MaxTokens, encode_chat, fit_chat
from pypto_serving.api.prompting.prompts import Prompter
from pypto_serving.api.settings import ServingConfig
from pypto_serving.errors import ContextLengthError, RequestError
from pypto_serving.types.sampling import (
    INT32_MAX,
    MAX_STOP_CHARS,
    MAX_STOPS,
    SamplingParams,
    check_max_tokens,
    check_stops,
)
from pypto_serving.types.structured import StructuredOutputsParams
from pypto_serving.util import brief

_NAME = {"type": "string", "maxLength": MAX_NAME_CHARS, "pattern": f"^{NAME.pattern}$"}
_WORDS = typed("text", {"text": TEXT})
_TEXTS = {"anyOf": [TEXT, list_of(_WORDS)]}
_RESULT = typed(
    "tool_result", {"tool_use_id": TEXT}, content={"anyOf": [*_TEXTS["anyOf"], {"type": "null"}]}, is_error=FLAG
)
_SAID = [_WORDS, typed("thinking", {"thinking": TEXT}), typed("redacted_thinking")]
_CALL = typed("tool_use", {"id": TEXT, "name": TEXT, "input": OBJECT})
_TURNS = [
    object_of({"role": {"const": "user"}, "content": {"anyOf": [TEXT, list_of({"anyOf": [_WORDS, _RESULT]})]}}),
    object_of({"role": {"const": "assistant"}, "content": {"anyOf": [TEXT, list_of({"anyOf": [*_SAID, _CALL]})]}}),
    object_of({"role": {"const": "system"}, "content": _TEXTS}),
]
_TOOL = object_of(
    {"name": _NAME, "input_schema": OBJECT},
    type={"enum": ["custom", None]},
    description=MAY_TEXT,
    strict=FLAG,
)
_CHOICES = [typed("auto"), typed("any"), typed("none"), typed("tool", {"name": _NAME})]
_BUDGET = {"type": "integer", "minimum": 1, "maximum": INT32_MAX}
MESSAGES = WithJsonSchema({"type": "array", "items": {"anyOf": _TURNS}, "minItems": 1, "maxItems": MAX_MESSAGES})
SYSTEM = or_null(*_TEXTS["anyOf"])
TOOLS = or_null(list_of(_TOOL) | {"maxItems": MAX_TOOLS})
TOOL_CHOICE = or_null(
    *(one | {"properties": one["properties"] | {"disable_parallel_tool_use": FLAG}} for one in _CHOICES)
)
THINKING = or_null(
    typed("enabled", budget_tokens={"anyOf": [_BUDGET, {"type": "null"}]}, display=MAY_TEXT),
    typed("adaptive", display=MAY_TEXT),
    typed("disabled"),
)
_JSON = typed("json_schema", {"schema": OBJECT})
FORMAT = or_null(_JSON)
OUTPUT_CONFIG = or_null(object_of({}, effort={"enum": [*EFFORTS, None]}, format={"anyOf": [_JSON, {"type": "null"}]}))
NOTHING = WithJsonSchema({"type": "null", "description": "Not supported."})
MAX_TOKENS = WithJsonSchema({"type": "integer", "minimum": 0, "maximum": INT32_MAX})
STOPS = or_null(list_of({"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}) | {"maxItems": MAX_STOPS})


_TOLD = "type cache_control"
_BLOCKS = by_type(
    text=keys(f"{_TOLD} text citations"),
    thinking=keys("type thinking signature"),
    redacted_thinking=keys("type data"),
    tool_use=keys(f"{_TOLD} id name input caller"),
    tool_result=keys(f"{_TOLD} tool_use_id is_error", content=by_type(text=keys(f"{_TOLD} text citations"))),
)


_TOOL_KEYS = keys(f"{_TOLD} name description input_schema strict")
_FORMAT = keys("type schema name")
_INNER = {
    "messages": keys("role", content=_BLOCKS),
    "system": _BLOCKS,
    "tools": lambda tool: _TOOL_KEYS if "input_schema" in tool else None,
    "tool_choice": keys("type name disable_parallel_tool_use"),
    "thinking": keys("type budget_tokens display"),
    "output_config": keys("effort", format=_FORMAT),
    "output_format": _FORMAT,
}


class CountTokensBody(Body):
    """The body of POST /v1/messages/count_tokens: a conversation."""

    rules: ClassVar[FieldRules] = FieldRules(
        accepted=frozenset(
            {
                "cache_control",
                "diagnostics",
                "inference_geo",
                "metadata",
                "service_tier",
                "speed",
                "user_profile_id",
                "workspace_id",
            }
        ),
        named={"container": (), "mcp_servers": ([],)},
        inner=_INNER,
    )
    """`cache_control` has no effect, since all prefixes are cached."""

    model: str | None = None
    messages: Annotated[list[Any], MESSAGES] = Field(fail_fast=True, max_length=MAX_MESSAGES)
    system: Annotated[Any, SYSTEM] = None
    tools: Annotated[Any, TOOLS] = None
    tool_choice: Annotated[Any, TOOL_CHOICE] = None
    thinking: Annotated[Any, THINKING] = None
    output_config: Annotated[Any, OUTPUT_CONFIG] = None
    output_format: Annotated[Any, FORMAT] = None
    thread: Annotated[Any, NOTHING] = None


class MessagesBody(CountTokensBody):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[int, MAX_TOKENS]
    stream: bool | None = None
    stop_sequences: Annotated[list[str] | None, STOPS] = Field(None, fail_fast=True, max_length=MAX_STOPS)
    temperature: Annotated[float | None, number(0, 100)] = None
    top_p: Annotated[float | None, ABOVE_0_TO_1] = None
    top_k: Annotated[int | None, whole(-1)] = None


PING_S = 10.0
"""A stream sends `ping` after this time without another event."""
_SAMPLING = ("temperature", "top_p", "top_k")


class Thought(NamedTuple):
    """Whether the model thinks, its limit of thinking tokens, and whether the answer omits the thinking."""

    on: bool = False
    budget: int | None = None
    hidden: bool = False


def read_messages(prompter: Prompter, serving: ServingConfig, raw: bytes | bytearray) -> ReadBody:
    """Parse, check, render and encode. The output ends at `max_tokens` or at the end of the context."""
    body = parse_json(raw, MessagesBody)
    check_max_tokens(body.max_tokens)
    given = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    check_stops(body.stop_sequences or (), "stop_sequences")
    field, form = "output_config", _output_config(body).get("format")
    params = SamplingParams(
        **{**serving.default_sampling.given(), **given},
        stop=tuple(body.stop_sequences or ()),
        max_tokens=body.max_tokens,
        structured_outputs=None if form is None else StructuredOutputsParams.read({"json": form["schema"]}, field),
    )
    chat, left_out = _chat(prompter, body, params)
    if chat.thinking_budget is not None and chat.thinking_budget >= body.max_tokens:
        complaint = f"is {chat.thinking_budget}, but must be less than max_tokens, which is {body.max_tokens}"
        refuse("thinking.budget_tokens", complaint)
    with _overflowing():
        prompt, fitted, form = fit_chat(prompter, chat)
    return ReadBody(
        model=serving.resolve_model(body.model),
        stream=bool(body.stream),
        ping_s=PING_S,
        ignored=_ignored(body, left_out),
        shown=Shown(),
        prompts=[prompt],
        params=fitted,
        new_parser=form,
    )


def read_count_tokens(prompter: Prompter, serving: ServingConfig, raw: bytes | bytearray) -> Answered:
    """Parse, check, render, encode and count; the prompt may be longer than the context."""
    body = parse_json(raw, CountTokensBody)
    chat, left_out = _chat(prompter, body, SamplingParams())
    with _overflowing():
        token_ids, _ = encode_chat(prompter, chat)
    serving.resolve_model(body.model)
    return Answered(_ignored(body, left_out), msgspec.json.encode(TokenCount(len(token_ids))))


def _ignored(body: CountTokensBody, left_out: list[str]) -> IgnoredFields:
    """Name what has no effect, among it a value of `display` that nobody knew when this was written."""
    display = (body.thinking or {}).get("display")
    shown = [] if display in (None, "summarized", "omitted") else ["thinking.display"]
    return IgnoredFields.of(body.unknown_fields() + shown + left_out)


@contextmanager
def _overflowing() -> Iterator[None]:
    """Say of a prompt that is too long what Anthropic says, by which agents know that they have to make it shorter."""
    try:
        yield
    except ContextLengthError as error:
        longest = min(error.max_model_len, error.num_tokens - 1)
        message = f"prompt is too long: {error.num_tokens} tokens > {longest} maximum"
        raise RequestError(message, param=error.param, code=error.code) from None


def _chat(prompter: Prompter, body: CountTokensBody, params: SamplingParams) -> tuple[ChatRequest, list[str]]:
    """Return what to answer, and the names of what is left out of it."""
    left_out, tools = LeftOut("messages"), LeftOut("tools")
    if body.thread is not None:
        refuse(
            "thread",
            "is not supported: this server keeps no conversations; send all messages instead",
            "thread_unsupported_request",
        )
    thought = _thought(body.thinking)
    history = read_history(body.system, body.messages, left_out)
    if not any(message["role"] in ("user", "tool") for message in history):
        refuse("messages", "have nothing to answer; send a user's message with content")
    chat = ChatRequest(
        messages=history,
        kwargs=_encoder_kwargs(body, thought, prompter.chat_encoder.request_fields) | _continuing(history),
        params=params,
        tools=read_tool_use(body.tools, body.tool_choice, tools),
        max_tokens=MaxTokens(params.max_tokens),
        thinking_budget=thought.budget,
        hides_reasoning=thought.hidden,
    )
    return chat, left_out.names + tools.names


def _continuing(history: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the option that continues the last message if it is the assistant's, else {}."""
    last = history[-1]
    if last["role"] != "assistant":
        return {}
    if not last["content"] or last.get("tool_calls"):
        refuse("messages", "end with the assistant, but not with text to continue; send results or a user's message")
    return {"continue_final_message": True}


def _encoder_kwargs(body: CountTokensBody, thought: Thought, request_fields: frozenset[str]) -> dict[str, Any]:
    """Return the encoder's options for reasoning, under both names that templates use, and for the output format."""
    kwargs: dict[str, Any] = {"enable_thinking": thought.on, "thinking": thought.on}
    config = _output_config(body)
    if config.get("effort") is not None:
        kwargs["reasoning_effort"] = config["effort"]
    if config.get("format") is not None and "response_format" in request_fields:
        kwargs["response_format"] = {"type": "json_schema", "json_schema": {"schema": config["format"]["schema"]}}
    return kwargs


def _thought(thinking: Any) -> Thought:
    """Read `thinking`. Without the field, thinking is turned off if the model allows it."""
    if thinking is None:
        return Thought()
    kind = thinking.get("type") if isinstance(thinking, Mapping) else None
    if kind not in ("enabled", "adaptive", "disabled"):
        refuse("thinking", f"is {brief(thinking)}, but must be an object of type 'enabled', 'adaptive' or 'disabled'")
    budget, display = thinking.get("budget_tokens"), thinking.get("display")
    if budget is not None and (type(budget) is not int or not 0 < budget <= INT32_MAX):
        refuse("thinking.budget_tokens", f"is {brief(budget)}, but must be between 1 and {INT32_MAX}")
    if not isinstance(display, str | None):
        refuse("thinking.display", f"is {brief(display)}, but must be a string")
    return Thought(kind != "disabled", budget if kind == "enabled" else None, display == "omitted")


def _output_config(body: CountTokensBody) -> Mapping[str, Any]:
    config = {} if body.output_config is None else body.output_config
    if not isinstance(config, Mapping):
        refuse("output_config", f"is {brief(config)}, but must be an object")
    check_effort(config.get("effort"), "output_config.effort")
    field, form = "output_config.format", config.get("format")
    if form is None:
        field, form = "output_format", body.output_format
    if form is not None:
        schema = form.get("schema") if isinstance(form, Mapping) and form.get("type") == "json_schema" else None
        if not isinstance(schema, Mapping):
            allowed = "{'type': 'json_schema', 'schema': {...}}"
            refuse(field, f"is {brief(form)}, but must be {allowed}")
    return {**config, "format": form}
