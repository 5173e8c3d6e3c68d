"""Describe the shared parts of answers and bodies for /openapi.json; write log-probabilities of a text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

import msgspec
from pydantic import WithJsonSchema

from pypto_serving.api.generation.choice import TokenUsage
from pypto_serving.api.generation.logprobs import ScoredToken, TokenEntry
from pypto_serving.types.sampling import INT32_MAX


class Answer(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all answers. Fields without a description are refused."""


AnswerT = TypeVar("AnswerT", bound=Answer)


def tagged(base: type[AnswerT], fields: Mapping[str, Mapping[str, Any]], prefix: str = "") -> dict[str, type[AnswerT]]:
    """Return types of answers by their tag, from the fields that each adds to those of `base`.

    In /openapi.json, `text_delta` is TextDelta. A `prefix` that ends with a dot is left out of names with more dots.
    """

    def name_of(tag: str) -> str:
        within = tag.removeprefix(prefix)
        return "".join(map(str.capitalize, re.split("[._]", within if "." in within else tag)))

    define: Callable[..., Any] = msgspec.defstruct
    return {tag: define(name_of(tag), [*own.items()], bases=(base,), tag=tag) for tag, own in fields.items()}


class TopLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ErrorDetails(Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Answer):
    """Every error, and the last event of a stream that fails."""

    error: ErrorDetails


class InputTokensDetails(Answer):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Answer):
    reasoning_tokens: int


class ResponseUsage(Answer):
    """Tokens of all prompts and outputs. Caching is free, so no tokens count as written to the cache."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: TokenUsage) -> Self:
        return cls(
            input_tokens=usage.num_prompt_tokens,
            input_tokens_details=InputTokensDetails(usage.num_cached_tokens, 0),
            output_tokens=usage.num_output_tokens,
            output_tokens_details=OutputTokensDetails(usage.num_reasoning_tokens),
            total_tokens=usage.num_prompt_tokens + usage.num_output_tokens,
        )


def chat_logprobs(entries: list[TokenEntry] | None) -> dict[str, Any] | None:
    """Write one object per token of the content, with its bytes, since a token may be part of a character.

    Objects are encoded to JSON at once: as Python objects, a long answer's would take five times the memory.
    """
    if entries is None:
        return None
    shown = (entry for entry in entries if not entry.ends)
    positions = (_chat_entry(each.chosen) | {"top_logprobs": list(map(_chat_entry, each.top))} for each in shown)
    return {"content": [msgspec.Raw(msgspec.json.encode(position)) for position in positions], "refusal": None}


def _chat_entry(token: ScoredToken) -> dict[str, Any]:
    return {"token": token.shown_text, "logprob": token.shown_logprob, "bytes": list(token.shown_bytes)}


Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
MAY_TEXT: Schema = {"type": ["string", "null"]}
OBJECT: Schema = {"type": "object"}
FLAG: Schema = {"type": ["boolean", "null"]}


def or_null(*schemas: Schema) -> WithJsonSchema:
    """Describe a field that has one of `schemas`, or null."""
    return WithJsonSchema({"anyOf": [*schemas, {"type": "null"}]})


def whole(low: int, high: int = INT32_MAX) -> WithJsonSchema:
    """Describe a whole number from `low` to `high`, or null."""
    return or_null({"type": "integer", "minimum": low, "maximum": high})


def number(low: float, high: float) -> WithJsonSchema:
    """Describe a number from `low` to `high`, or null."""
    return or_null({"type": "number", "minimum": low, "maximum": high})


def text(min_chars: int, max_chars: int) -> WithJsonSchema:
    """Describe a text of `min_chars` to `max_chars` characters, or null."""
    return or_null({"type": "string", "minLength": min_chars, "maxLength": max_chars})


def list_of(items: Schema, min_items: int = 0, max_items: int | None = None) -> Schema:
    """Describe a list."""
    schema = {"type": "array", "items": items, "minItems": min_items, "maxItems": max_items}
    return {name: value for name, value in schema.items() if value}


def object_of(required: Schema, **optional: Schema) -> Schema:
    """Describe an object by its properties."""
    needed = {"required": list(required)} if required else {}
    return {"type": "object", "properties": required | optional, **needed}


def typed(kind: str, required: Schema | None = None, **optional: Schema) -> Schema:
    """Describe an object with a `type`."""
    return object_of({"type": {"const": kind}, **(required or {})}, **optional)


ABOVE_0_TO_1 = or_null({"type": "number", "exclusiveMinimum": 0, "maximum": 1})
