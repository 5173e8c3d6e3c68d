"""Read the body of POST /v1/responses. Raises RequestError that names the field."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec
from pydantic import Field

from pypto_serving.api.chat.leaving_out import LeftOut, is_hosted
from pypto_serving.api.chat.tools import check_effort, refuse
from pypto_serving.api.common.body import (
    PARTS,
    RESPONSE_FORMAT,
    Answered,
    FieldRules,
    IgnoredFields,
    ReadBody,
    Repeated,
    Shown,
    StreamBody,
    by_type,
    keys,
    parse_json,
)
from pypto_serving.api.common.described import ABOVE_0_TO_1, number, whole
from pypto_serving.api.generation.request import ChatRequest, MaxTokens, encode_chat, fit_chat
from pypto_serving.api.prompting.prompts import Prompter
from pypto_serving.api.responses.answers import ResponseInputTokens
from pypto_serving.api.responses.history import read_history, read_items, read_response_tools
from pypto_serving.api.settings import ServingConfig
from pypto_serving.types.sampling import MAX_LOGPROBS, SamplingParams, check_max_tokens
from pypto_serving.types.structured import StructuredOutputsParams, structure_of
from pypto_serving.util import brief

MAX_ID_CHARS = 128


_RESULT = keys("type id call_id output status created_by")
_INNER = {
    "text": keys("", format=RESPONSE_FORMAT),
    "reasoning": keys("effort summary generate_summary"),
    "tools": by_type(custom=keys("type name description", format=keys("type syntax definition"))),
    "tool_choice": keys("type name mode tools"),
    "input": by_type(
        "message",
        message=keys("type id role status phase", content=PARTS),
        function_call=keys("type id call_id name namespace arguments status created_by"),
        custom_tool_call=keys("type id call_id name namespace input status created_by"),
        function_call_output=_RESULT,
        custom_tool_call_output=_RESULT,
        reasoning=keys("type id summary content encrypted_content status"),
    ),
}
"""Templates get whole functions, so all of their keys may have an effect."""


class ResponsesBody(StreamBody):
    """The body of POST /v1/responses."""

    rules: ClassVar[FieldRules] = FieldRules(
        {
            "background": (False,),
            "conversation": (),
            "multi_agent": (),
            "prompt": (),
        },
        frozenset(
            {
                "prompt_cache_key",
                "prompt_cache_options",
                "prompt_cache_retention",
                "access_programs",
                "client_metadata",
                "safety_identifier",
                "service_tier",
                "stream_options",
                "user",
            }
        ),
        {
            "background_options": (),
            "context_management": ([],),
            "image": (),
            "max_tool_calls": (),
            "moderation": (),
            "truncation": ("disabled",),
        },
        _INNER,
    )
    """Nothing runs in the background, so a disconnect ends the request. Items are never cut from the input."""

    model: str | None = None
    input: Any = None
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=MAX_ID_CHARS)
    store: bool | None = None
    max_output_tokens: Annotated[int | None, whole(1)] = None
    temperature: Annotated[float | None, number(0, 100)] = None
    top_p: Annotated[float | None, ABOVE_0_TO_1] = None
    top_logprobs: Annotated[int | None, whole(0, MAX_LOGPROBS)] = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = Field(None, fail_fast=True, max_length=16)
    metadata: dict[str, str] | None = None


MAX_METADATA, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512
_SUMMARIES = (None, "auto", "concise", "detailed")
_SCHEMA = "text.format.schema"
_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")


class _Kept(msgspec.Struct):
    """What stands before a body: the items of earlier responses, and those that it refers to, by id."""

    earlier: msgspec.Raw
    referred: dict[str, msgspec.Raw] | None


def with_earlier(raw: bytearray, earlier: bytes, referred: dict[str, msgspec.Raw] | None) -> bytearray:
    """Put the items of earlier responses, and those that the body refers to, before it, for `read_response`.

    `referred` is None if the body is too long for references.
    """
    kept = msgspec.json.encode(_Kept(msgspec.Raw(earlier or b"[]"), referred))
    raw[:0] = b"%d\n%b" % (len(kept), kept)
    return raw


class _Asked(NamedTuple):
    """A body and what it asks for: `items` are its own, `earlier` those before them."""

    body: ResponsesBody
    earlier: list[Any]
    items: list[Any]
    form: dict[str, Any]
    chat: ChatRequest
    ignored: IgnoredFields


def read_response(prompter: Prompter, serving: ServingConfig, framed: bytes | bytearray) -> ReadBody:
    """Parse, check, render and encode the output of `with_earlier`."""
    body, earlier, items, form, chat, ignored = _read(serving, framed)
    prompt, fitted, parser = fit_chat(prompter, chat)
    model = serving.resolve_model(body.model)
    echo = msgspec.json.encode(_echo(body, fitted, form))
    kept = body.store is not False
    own = {item["id"]: msgspec.json.encode(item) for item in items} if kept else {}
    repeated = Repeated(echo, msgspec.json.encode(earlier + items), kept, own)
    return ReadBody(
        model=model,
        stream=bool(body.stream),
        ping_s=body.ping_s,
        ignored=ignored,
        shown=Shown(logprobs=chat.params.logprobs),
        prompts=[prompt],
        params=fitted,
        new_parser=parser,
        repeated=repeated,
    )


def read_input_tokens(prompter: Prompter, serving: ServingConfig, framed: bytes | bytearray) -> Answered:
    """Parse, check, render, encode and count; the prompt may be longer than the context."""
    asked = _read(serving, framed)
    token_ids, _ = encode_chat(prompter, asked.chat)
    serving.resolve_model(asked.body.model)
    count = ResponseInputTokens("response.input_tokens", len(token_ids))
    return Answered(asked.ignored, msgspec.json.encode(count))


def _read(serving: ServingConfig, framed: bytes | bytearray) -> _Asked:
    start = framed.index(b"\n") + 1
    end = start + int(framed[: start - 1])
    kept = msgspec.json.decode(framed[start:end])
    earlier = kept["earlier"]
    body = parse_json(framed[end:], ResponsesBody)
    tools_left_out, left_out = LeftOut("tools"), LeftOut("input")
    _check_metadata(body.metadata or {})
    items = read_items(body.input, left_out, kept["referred"])
    history = read_history(body.instructions, [*earlier, *items], left_out, len(earlier))
    tools = read_response_tools(body.tools, body.tool_choice, body.parallel_tool_calls, tools_left_out)
    unknown = body.unknown_fields() + _not_shown(body)
    if body.previous_response_id is not None and not earlier:
        refuse("previous_response_id", "could not be read; write its name without escapes")
    if not items or not history:
        refuse("input", "has nothing to answer; send text or items")
    check_max_tokens(body.max_output_tokens, "max_output_tokens", least=1)
    form = _text_format(body)
    chat = ChatRequest(
        messages=history,
        messages_field="input",
        kwargs=_effort(body),
        params=_sampling(body, serving, form),
        tools=tools,
        max_tokens=MaxTokens.of_chat(serving, body.max_output_tokens, "max_output_tokens"),
        stream=bool(body.stream),
    )
    ignored = IgnoredFields.of(unknown + sorted(tools_left_out.names) + left_out.names)
    return _Asked(body, earlier, items, form, chat, ignored)


def _sampling(body: ResponsesBody, serving: ServingConfig, form: dict[str, Any]) -> SamplingParams:
    logprobs = body.top_logprobs or 0 if _LOGPROBS in (body.include or ()) else None
    if body.top_logprobs and logprobs is None:
        refuse("top_logprobs", f"is only allowed together with include = [{_LOGPROBS!r}]")
    given = {name: value for name in ("temperature", "top_p") if (value := getattr(body, name)) is not None}
    return SamplingParams(
        **{**serving.default_sampling.given(), **given},
        max_tokens=body.max_output_tokens,
        logprobs=logprobs,
        structured_outputs=_structure(form),
    )


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        refuse("metadata", f"has {len(metadata)} entries, but must have at most {MAX_METADATA}")
    for key, value in metadata.items():
        if len(key) > MAX_KEY_CHARS or len(value) > MAX_VALUE_CHARS:
            refuse("metadata", f"must have keys of at most {MAX_KEY_CHARS} and values of {MAX_VALUE_CHARS} characters")


def _not_shown(body: ResponsesBody) -> list[str]:
    """Name the fields that ask to show what no answer here has."""
    reasoning = body.reasoning or {}
    summaries = [f"reasoning.{f}" for f in ("summary", "generate_summary") if reasoning.get(f) not in _SUMMARIES]
    return summaries + [f"include.{name}" for name in body.include or () if name not in _INCLUDED]


def _effort(body: ResponsesBody) -> dict[str, Any]:
    """Return the encoder's options for reasoning; without an effort, the template decides."""
    given = body.reasoning or {}
    effort = given.get("effort")
    check_effort(effort, "reasoning.effort")
    if effort is None:
        return {}
    thinks = effort != "none"
    return {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}


def _text_format(body: ResponsesBody) -> dict[str, Any]:
    form = (body.text or {}).get("format")
    form = {"type": "text"} if form is None else form
    kind = form.get("type") if isinstance(form, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        refuse("text.format", f"is {brief(form)}, but its type must be 'text', 'json_object' or 'json_schema'")
    if kind != "text":
        _structure(form)
    if kind == "json_schema":
        inner = form.get("json_schema")
        name = form.get("name", inner.get("name") if isinstance(inner, dict) else None)
        if not isinstance(name, str) or not 0 < len(name) <= MAX_KEY_CHARS:
            refuse("text.format.name", f"must be a string of 1 to {MAX_KEY_CHARS} characters")
    return dict(form)


def _structure(form: dict[str, Any]) -> StructuredOutputsParams | None:
    if form["type"] == "text":
        return None
    return StructuredOutputsParams.read(structure_of(form, _SCHEMA, _SCHEMA), "text")


def _echo(body: ResponsesBody, params: SamplingParams, form: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an answer that repeat the body."""
    given = body.reasoning or {}
    summary = given.get("summary")
    offered = [tool for tool in body.tools or () if not is_hosted(tool)]
    common = {"function": {"parameters": None, "strict": None}}
    tools = [common.get(tool["type"], {}) | tool for tool in offered]
    return {
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "temperature": params.temperature,
        "tool_choice": body.tool_choice or "auto",
        "tools": tools,
        "top_p": params.top_p,
        "max_output_tokens": body.max_output_tokens,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": given.get("effort"), "summary": summary if summary in _SUMMARIES else None},
        "text": {"format": form},
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled",
        "background": False,
    }
