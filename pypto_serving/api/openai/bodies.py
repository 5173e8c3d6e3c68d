"""Read the bodies of POST /v1/completions and /v1/chat/completions. Errors name the field at fault."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from pypto_serving.api.chat.leaving_out import LeftOut, is_hosted, newest_words
from pypto_serving.api.chat.tools import ToolUse, read_tool_use, refuse
from pypto_serving.api.common.body import MAX_SALT_CHARS, IgnoredFields, ReadBody, Shown, parse_json
from pypto_serving.api.generation.request import (
    ChatRequest,
    MaxTokens,
    check_num_choices,
    check_prompt_logprobs,
    fit_chat,
    fit_num_logprobs,
    fit_params,
    fit_prompt,
    read_message,
)
from pypto_serving.api.openai.schemas import (
    TIERS,
    ChatBody,
    ChatMessage,
    ChatPromptBody,
    CompletionBody,
    GenerationBody,
)
from pypto_serving.api.prompting.prompts import Prompter, field_of
from pypto_serving.api.prompting.template import RESERVED
from pypto_serving.api.settings import DefaultSampling, ServingConfig
from pypto_serving.errors import RequestError
from pypto_serving.types.config import default_of
from pypto_serving.types.sampling import MAX_LOGPROBS, MAX_N, SamplingParams, check_max_tokens
from pypto_serving.types.structured import StructuredOutputsParams, structure_of
from pypto_serving.util import brief

MAX_PRIORITY = 2**31 - 1
_TOKEN_ID = re.compile("[0-9]{1,10}")
_CONVERTED = ("stop", "stop_token_ids", "logit_bias", "max_tokens", "logprob_token_ids", "structured_outputs")
_PLAIN = [name for name in SamplingParams.__struct_fields__ if name in GenerationBody.model_fields.keys() - _CONVERTED]
"""Sampling parameters that bodies have in the same form."""
BodyT = TypeVar("BodyT", bound=GenerationBody)
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_GUIDED: dict[str, tuple[str, Any]] = {
    "guided_json": ("json", {}),
    "guided_regex": ("regex", ""),
    "guided_choice": ("choice", []),
    "guided_grammar": ("grammar", ""),
    "structural_tag": ("structural_tag", {}),
}
"""vLLM's older fields: the name of each in structured_outputs, and the value that asks for nothing."""


def sampling_params(
    body: GenerationBody,
    defaults: DefaultSampling,
    max_tokens: int | None,
    logprobs: int | None,
) -> SamplingParams:
    """Merge the body with the server's defaults. Raises RequestError that names the field at fault."""
    values: dict[str, Any] = defaults.given()
    values |= {name: value for name in _PLAIN if (value := getattr(body, name)) is not None}
    return SamplingParams(
        **values,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        stop=_stop_strings(body.stop),
        logit_bias=_logit_bias(body.logit_bias),
        max_tokens=max_tokens,
        logprobs=0 if logprobs is None and body.logprob_token_ids else logprobs,
        logprob_token_ids=tuple(body.logprob_token_ids or ()),
        structured_outputs=structured_outputs(body),
    )


def priority_of(body: GenerationBody, may_choose: bool) -> int:
    """Return the priority; lower is served earlier. Raises RequestError if it does not fit 32 bits.

    Unless clients `may_choose`, only 0, the default, is accepted.
    """
    if body.priority and not may_choose:
        refuse(
            "priority",
            f"is {brief(body.priority)}, but this server lets no client choose one; leave it out",
            "unsupported_field",
        )
    if body.priority is not None and not -MAX_PRIORITY <= body.priority <= MAX_PRIORITY:
        refuse("priority", f"is {brief(body.priority)}, but must be between {-MAX_PRIORITY} and {MAX_PRIORITY}")
    return body.priority or 0


def cache_salt_of(body: GenerationBody) -> str:
    """Return the cache salt, "" for none. Raises RequestError for an empty one, which would separate nobody."""
    if body.cache_salt == "":
        refuse("cache_salt", "is empty; send text, or leave it out")
    if body.cache_salt is not None and len(body.cache_salt) > MAX_SALT_CHARS:
        refuse("cache_salt", f"has {len(body.cache_salt)} characters, but must have at most {MAX_SALT_CHARS}")
    return body.cache_salt or ""


def _logit_bias(given: dict[str, float] | None) -> dict[int, float]:
    """Return the biases by token id; JSON writes the ids as strings."""
    for key in given or {}:
        if not _TOKEN_ID.fullmatch(key):
            refuse("logit_bias", f"has the key {brief(key)}, but must map token ids to numbers")
    return {int(key): value for key, value in (given or {}).items()}


def _stop_strings(stop: Any) -> tuple[str, ...]:
    entries = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        refuse("stop", f"is {brief(stop)}, but must be a string or a list of strings", "invalid_type")
    return tuple(entries)


def parse_body(
    raw: bytes | bytearray, schema: type[BodyT], serving: ServingConfig, known: frozenset[str] = frozenset()
) -> tuple[BodyT, dict[str, Any]]:
    """Return the body as `schema`, and the fields of ReadBody that both endpoints share.

    `known` are fields that the chat encoder reads. Raises RequestError naming the field at fault.
    """
    body = parse_json(raw, schema)
    unknown = body.unknown_fields(known)
    if body.stream_options is not None:
        if not body.stream:
            refuse("stream_options", "is only allowed together with stream = true")
        unknown += body.stream_options.unknown_fields(prefix="stream_options.")
    if body.service_tier not in (None, *TIERS):
        unknown.append("service_tier")
    return body, {
        "model": serving.resolve_model(body.model),
        "stream": bool(body.stream),
        "ping_s": body.ping_s,
        "ignored": IgnoredFields.of(unknown),
        "priority": priority_of(body, serving.client_priority),
        "cache_salt": cache_salt_of(body),
        "timeout_s": body.timeout,
    }


def read_shown(body: GenerationBody, params: SamplingParams) -> Shown:
    """Read what the answer to `body` shows; `params` are its sampling parameters. Raises RequestError."""
    if body.stream and body.prompt_logprobs is not None:
        refuse("prompt_logprobs", "is not available together with stream = true; leave one of them out")
    if body.request_id is not None and not _REQUEST_ID.fullmatch(body.request_id):
        refuse("request_id", f"is {brief(body.request_id)}, but must have 1 to 128 visible characters of ASCII")
    options = body.stream_options
    usage = bool(options and options.include_usage)
    return Shown(
        request_id=body.request_id,
        n=params.n,
        usage=usage,
        usage_so_far=usage and bool(options and options.continuous_usage_stats),
        logprobs=params.logprobs,
        echo=isinstance(body, CompletionBody) and bool(body.echo),
        prompt_logprobs=body.prompt_logprobs,
        token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        truncation=body.truncate_prompt_tokens is not None,
        service_tier=None if body.service_tier is None else "default",
    )


def structured_outputs(body: GenerationBody) -> StructuredOutputsParams | None:
    """Return the structure that the output must have, None for any. Raises RequestError that names the field."""
    given: list[tuple[str, dict[str, Any]]] = []
    if (found := _of_response_format(body.response_format)) is not None:
        given.append(("response_format", found))
    if body.structured_outputs is not None:
        if not isinstance(body.structured_outputs, dict):
            raise _refusal("structured_outputs", body.structured_outputs, "an object", "invalid_type")
        given.append(("structured_outputs", body.structured_outputs))
    for field, (name, nothing) in _GUIDED.items():
        if (value := getattr(body, field)) not in (None, "", nothing):
            given.append((field, {name: value}))
    if len(given) > 1:
        names = " and ".join(field for field, _ in given)
        raise RequestError(f"{names} are given, but an output has one structure; send one", param=given[1][0])
    if not given and body.guided_whitespace_pattern is not None:
        name = "guided_whitespace_pattern"
        raise RequestError(f"{name} is given, but no JSON is asked for; leave it out", param=name)
    if not given:
        return None
    field, values = given[0]
    if body.guided_whitespace_pattern is not None:
        values = {"whitespace_pattern": body.guided_whitespace_pattern, **values}
    return StructuredOutputsParams.read(values, field)


def _of_response_format(wanted: Any) -> dict[str, Any] | None:
    """Read OpenAI's `response_format`; `strict` and `name` change nothing, since a schema is always enforced."""
    if wanted is None:
        return None
    field = "response_format"
    if not isinstance(wanted, dict):
        raise _refusal(field, wanted, "an object with a type", "invalid_type")
    kind = wanted.get("type")
    if kind == "text":
        return None
    if kind == "structural_tag":
        return {"structural_tag": {name: value for name, value in wanted.items() if name != "type"}}
    if kind not in ("json_object", "json_schema"):
        raise _refusal(f"{field}.type", kind, "text, json_object, json_schema or structural_tag")
    return structure_of(wanted, f"{field}.json_schema.schema", field)


def _refusal(name: str, value: object, allowed: str, code: str | None = None) -> RequestError:
    message = f"{name} is {brief(value)}, but must be {allowed}"
    return RequestError(message, param=name.partition(".")[0], code=code)


_ENCODED = ("add_generation_prompt", "continue_final_message", "chat_template", "documents", "reasoning_effort")
"""Fields that the encoder takes besides messages and tools."""


def read_chat(prompter: Prompter, serving: ServingConfig, raw: bytes | bytearray) -> ReadBody:
    """Parse, check, render and encode. Raises RequestError that names the field at fault."""
    encoder = prompter.chat_encoder
    body, common = parse_body(raw, ChatBody, serving, encoder.request_fields)
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    asked = getattr(body, field)
    check_max_tokens(asked, field, least=1)
    params = sampling_params(body, serving.default_sampling, asked, _num_logprobs(body))
    shown = read_shown(body, params)
    history, left_out = read_history(body.messages)
    tools, dropped = read_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    common["ignored"] = common["ignored"].and_also(left_out + dropped)
    chat = ChatRequest(
        messages=history,
        kwargs=encoder_kwargs(body, encoder.request_fields, serving.trust_request_chat_template),
        params=params,
        tools=tools,
        max_tokens=MaxTokens.of_chat(serving, asked, field),
        keeps_start=body.truncation_side == "right",
        add_special_tokens=bool(body.add_special_tokens),
        thinking_budget=body.thinking_token_budget,
        hides_reasoning=body.include_reasoning is False,
        stream=bool(body.stream),
    )
    prompt, fitted, form = fit_chat(prompter, chat)
    return ReadBody(prompts=[prompt], params=fitted, shown=shown, new_parser=form, **common)


def _num_logprobs(body: ChatBody) -> int | None:
    word = "greater_than_equal" if (body.top_logprobs or 0) < 0 else "less_than_equal"
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        refuse("top_logprobs", f"is {body.top_logprobs}, but must be between 0 and {MAX_LOGPROBS} ({word})")
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        refuse("top_logprobs", "is only allowed together with logprobs = true")
    return None


def encoder_kwargs(body: ChatPromptBody, request_fields: frozenset[str], trusts_templates: bool) -> dict[str, Any]:
    """Return what ChatEncoder.encode takes besides the messages and tools. Raises RequestError."""
    if body.chat_template is not None and not trusts_templates:
        refuse(
            "chat_template",
            "is refused: this server runs without the option trust-request-chat-template",
            "unsupported_field",
        )
    given = body.chat_template_kwargs or {}
    if reserved := sorted(RESERVED & given.keys()):
        names = ", ".join(reserved)
        refuse("chat_template_kwargs", f"must not set {names}")
    sent = {**body.extra, "response_format": body.response_format}
    fields = {name: value for name, value in sent.items() if name in request_fields}
    fields |= {name: getattr(body, name) for name in _ENCODED}
    fields = {name: value for name, value in fields.items() if value is not None}
    if twice := sorted(fields.keys() & given.keys()):
        names = ", ".join(twice)
        raise RequestError(f"chat_template_kwargs and the request both have {names}; send one", param=twice[0])
    return {**given, **fields}


def read_tools(tools: Any, choice: Any, parallel: bool | None) -> tuple[ToolUse, list[str]]:
    """Read `tools` and `tool_choice`; also return the names of tools that are left out. Raises RequestError."""
    left_out = LeftOut("tools")
    hosted = [tool for tool in tools if is_hosted(tool)] if isinstance(tools, list) else []
    return read_tool_use(*left_out.tools(tools, choice, hosted), parallel), left_out.names


def read_history(messages: Sequence[ChatMessage]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return messages as ChatEncoder.encode takes them, and the names of parts that are left out. Raises RequestError.

    Images are refused in what a person has just written; elsewhere a text takes their place.
    """
    if not messages:
        refuse("messages", "is an empty list; send at least one message")
    left_out = LeftOut("messages")
    newest = newest_words([_SPEAKS_AS.get(message.role, message.role) for message in messages])
    given = ({**m.extra, "role": m.role, "content": m.content} for m in messages)
    history = [
        read_message(message, f"messages[{i}]", None if i == newest or message["role"] in INSTRUCTING else left_out)
        for i, message in enumerate(given)
    ]
    return history, left_out.names


_SPEAKS_AS = {"function": "tool"}
INSTRUCTING = ("system", "developer")


DEFAULT_MAX_TOKENS = default_of(SamplingParams, "max_tokens")


def read_completion(prompter: Prompter, serving: ServingConfig, raw: bytes | bytearray) -> ReadBody:
    """Parse, check and encode. Raises RequestError that names the field at fault."""
    body, common = parse_body(raw, CompletionBody, serving)
    given = sampling_params(body, serving.default_sampling, body.max_tokens, body.logprobs)
    shown = read_shown(body, given)
    params = fit_params(_made(given, shown, check_best_of(body.best_of, given.n, bool(body.stream))), prompter)
    limit = MaxTokens(params.max_tokens, default=DEFAULT_MAX_TOKENS, strict=serving.strict_max_tokens)
    prompts = [
        fit_prompt(
            ids,
            limit,
            prompter.config,
            truncate_to=params.truncate_prompt_tokens,
            keeps_start=body.truncation_side == "right",
            text=text if shown.echo else None,
        )
        for ids, text in encode_prompts(prompter, body.prompt, params.n, body.add_special_tokens is not False)
    ]
    check_prompt_logprobs(prompts, params)
    if not body.stream:
        prompts = fit_num_logprobs(prompts, params, body.max_tokens)
    return ReadBody(prompts=prompts, params=params, shown=shown, **common)


def _made(params: SamplingParams, shown: Shown, num_made: int) -> SamplingParams:
    """Add to `params` the log-probabilities by which the best choices are found, and those of echoed prompts."""
    made: dict[str, Any] = {}
    if num_made > shown.n:
        made |= {"n": num_made, "logprobs": shown.logprobs or 0}
    if shown.echo and shown.logprobs is not None:
        made["prompt_logprobs"] = max(shown.logprobs, shown.prompt_logprobs or 0)
    return msgspec.structs.replace(params, **made) if made else params


def check_best_of(best_of: int | None, n: int, stream: bool) -> int:
    """Return how many choices of each prompt to make for `n` that are shown. Raises RequestError."""
    if best_of is None:
        return n
    if not n <= best_of <= MAX_N:
        refuse("best_of", f"is {brief(best_of)}, but must be between n, which is {n}, and {MAX_N}")
    if stream and best_of > n:
        refuse("best_of", f"is {best_of} and n is {n}, but the best choices are known only at the end; do not stream")
    return best_of


class EncodedPrompt(NamedTuple):
    """The token ids of a prompt, and its text if that was given."""

    token_ids: list[int]
    text: str | None


def encode_prompts(prompter: Prompter, prompt: Any, num_each: int, add_special_tokens: bool) -> Iterator[EncodedPrompt]:
    """Encode the prompts one by one; `num_each` choices are made of each.

    Raises RequestError that names the prompt at fault.
    """
    if isinstance(prompt, str) or _is_ids(prompt):
        return iter([_encode(prompter, prompt, "prompt", add_special_tokens)])
    if not isinstance(prompt, list):
        raise _bad_type("prompt", prompt)
    if not prompt:
        refuse("prompt", "is an empty list; send at least one prompt with at least one token")
    if type(prompt[0]) is int:
        raise _bad_type("prompt", next(entry for entry in prompt if type(entry) is not int))
    check_num_choices(len(prompt) * num_each, len(prompt), prompter.config)
    return (_encode(prompter, entry, f"prompt[{i}]", add_special_tokens) for i, entry in enumerate(prompt))


def _encode(prompter: Prompter, entry: Any, where: str, add_special_tokens: bool) -> EncodedPrompt:
    if isinstance(entry, str):
        return EncodedPrompt(prompter.encode_text(entry, where, add_special_tokens), entry)
    if _is_ids(entry):
        return EncodedPrompt(prompter.check_token_ids(entry, where), None)
    if entry == []:
        raise RequestError(f"{where} is an empty list; send at least one token", param=field_of(where))
    raise _bad_type(where, entry)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)


def _bad_type(where: str, value: Any) -> RequestError:
    forms = "a string, a list of strings, a list of token ids or a list of lists of token ids"
    if value is None:
        return RequestError(f"{where} is missing; send {forms}", param=field_of(where), code="missing_field")
    return RequestError(
        f"{where} holds {brief(value)}; prompt must be {forms}", param=field_of(where), code="invalid_type"
    )
