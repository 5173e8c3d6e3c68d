"""Read SamplingParams, priority and cache salt from a request body."""

from __future__ import annotations

import re
from typing import Any, TypeVar

from pypto_serving.api.common.body import MAX_SALT_CHARS, IgnoredFields, Shown, parse_json
from pypto_serving.api.openai.schemas import CompletionBody, GenerationBody
from pypto_serving.api.settings import DefaultSampling, ServingConfig
from pypto_serving.errors import RequestError
from pypto_serving.types.sampling import SamplingParams
from pypto_serving.types.structured import StructuredOutputsParams
from pypto_serving.util import brief

MAX_PRIORITY = 2**31 - 1
_TOKEN_ID = re.compile("[0-9]{1,10}")
_PLAIN = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "ignore_eos",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "truncate_prompt_tokens",
)
BodyT = TypeVar("BodyT", bound=GenerationBody)
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_GUIDED: dict[str, tuple[str, Any]] = {
    "guided_json": ("json", {}),
    "guided_regex": ("regex", ""),
    "guided_choice": ("choice", []),
    "guided_grammar": ("grammar", ""),
    "structural_tag": ("structural_tag", {}),
}
"""Older names of vLLM, with those in structured_outputs and with values that ask for nothing."""


def sampling_params(
    body: GenerationBody,
    defaults: DefaultSampling,
    max_tokens: int | None,
    logprobs: int | None,
) -> SamplingParams:
    """Join the body with the server's defaults. Raises RequestError that names the field at fault."""
    values: dict[str, Any] = defaults.given()
    values |= {name: value for name in _PLAIN if (value := getattr(body, name)) is not None}
    return SamplingParams(
        **values,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        stop=_stop_strings(body.stop),
        logit_bias=_logit_bias(body.logit_bias),
        max_tokens=max_tokens,
        logprobs=logprobs,
        structured_outputs=structured_outputs(body),
    )


def priority_of(body: GenerationBody, may_choose: bool) -> int:
    """Return the priority; lower is served earlier. Raises RequestError if it does not fit 32 bits.

    Unless clients `may_choose`, only 0, the default, is accepted.
    """
    if body.priority and not may_choose:
        message = f"priority is {brief(body.priority)}, but this server lets no client choose one; leave it out"
        raise RequestError(message, param="priority", code="unsupported_field")
    if body.priority is not None and not -MAX_PRIORITY <= body.priority <= MAX_PRIORITY:
        message = f"priority is {brief(body.priority)}, but must be between {-MAX_PRIORITY} and {MAX_PRIORITY}"
        raise RequestError(message, param="priority")
    return body.priority or 0


def cache_salt_of(body: GenerationBody) -> str:
    """Return the cache salt, "" for none. Raises RequestError for an empty one, which would separate nobody."""
    if body.cache_salt == "":
        raise RequestError("cache_salt is empty; send text, or leave it out", param="cache_salt")
    if body.cache_salt is not None and len(body.cache_salt) > MAX_SALT_CHARS:
        message = f"cache_salt has {len(body.cache_salt)} characters, but must have at most {MAX_SALT_CHARS}"
        raise RequestError(message, param="cache_salt")
    return body.cache_salt or ""


def _logit_bias(given: dict[str, float] | None) -> dict[int, float]:
    """Return the biases by token id; JSON writes the ids as strings."""
    for key in given or {}:
        if not _TOKEN_ID.fullmatch(key):
            raise RequestError(
                f"logit_bias has the key {brief(key)}, but must map token ids to numbers", param="logit_bias"
            )
    return {int(key): value for key, value in (given or {}).items()}


def _stop_strings(stop: Any) -> tuple[str, ...]:
    entries = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise RequestError(
            f"stop is {brief(stop)}, but must be a string or a list of strings",
            param="stop",
            code="invalid_type",
        )
    return tuple(entries)


def parse_body(
    raw: bytes | bytearray, schema: type[BodyT], known: frozenset[str] = frozenset()
) -> tuple[BodyT, IgnoredFields]:
    """Return the body as `schema` and its ignored fields. Raises RequestError naming the field at fault.

    `known` are fields that the chat encoder reads.
    """
    body = parse_json(raw, schema)
    unknown = body.unknown_fields(known)
    if body.stream_options is not None:
        if not body.stream:
            raise RequestError("stream_options is only allowed together with stream = true", param="stream_options")
        unknown += body.stream_options.unknown_fields(prefix="stream_options.")
    return body, IgnoredFields.of(unknown)


def read_common(body: GenerationBody, ignored: IgnoredFields, serving: ServingConfig) -> dict[str, Any]:
    """Return the fields of ReadBody that both endpoints share. Raises RequestError."""
    return {
        "model": serving.resolve_model(body.model),
        "stream": bool(body.stream),
        "ping_s": body.ping_s,
        "ignored": ignored,
        "priority": priority_of(body, serving.client_priority),
        "cache_salt": cache_salt_of(body),
        "timeout_s": body.timeout,
    }


def read_shown(body: GenerationBody, params: SamplingParams) -> Shown:
    """Read what `body` asks for, whose sampling parameters are `params`. Raises RequestError."""
    if body.stream and body.prompt_logprobs is not None:
        message = "prompt_logprobs is not available together with stream = true; leave one of them out"
        raise RequestError(message, param="prompt_logprobs")
    if body.request_id is not None and not _REQUEST_ID.fullmatch(body.request_id):
        message = f"request_id is {brief(body.request_id)}, but must have 1 to 128 visible characters of ASCII"
        raise RequestError(message, param="request_id")
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
    if kind == "json_object":
        return {"json_object": True}
    if kind == "structural_tag":
        return {"structural_tag": {name: value for name, value in wanted.items() if name != "type"}}
    if kind != "json_schema":
        raise _refusal(f"{field}.type", kind, "text, json_object, json_schema or structural_tag")
    described = wanted.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        raise _refusal(f"{field}.json_schema.schema", schema, "a JSON schema")
    return {"json": schema}


def _refusal(name: str, value: object, allowed: str, code: str | None = None) -> RequestError:
    field = name.partition(".")[0]
    return RequestError(f"{name} is {brief(value)}, but must be {allowed}", param=field, code=code)
