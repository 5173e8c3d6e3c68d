"""Parse request bodies; every malformed one is a 4xx."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import Request

from pypto_serving.api.errors import MAX_DROPPED_BODIES, BodyTooLargeError, ContentTypeError
from pypto_serving.api.openai.fields import STREAM_OPTION_RULES, FieldRules
from pypto_serving.api.openai.params import cache_salt_of, priority_of
from pypto_serving.api.openai.schemas import GenerationBody
from pypto_serving.api.settings import ServingConfig
from pypto_serving.errors import RequestError

MAX_VALUES = 2_000_000
"""Bounds the values of a body before it is parsed, by the characters that come with each."""
BodyT = TypeVar("BodyT", bound=GenerationBody)


async def read_body(request: Request, limit: int) -> bytearray:
    """Read the whole body. Raises BodyTooLargeError above `limit` bytes.

    Up to MAX_DROPPED_BODIES times the limit is received and dropped first.
    """
    body = bytearray()
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= limit:
            body += chunk
        elif size > MAX_DROPPED_BODIES * limit:
            break
        else:
            body.clear()
    if size > limit:
        raise BodyTooLargeError(limit)
    return body


def parse_body(raw: bytes | bytearray, schema: type[BodyT], rules: FieldRules) -> tuple[BodyT, list[str]]:
    """Return the body as `schema` and the names of ignored fields. Raises RequestError naming the field at fault."""
    if len(raw) > MAX_VALUES and sum(map(raw.count, (b",", b"[", b"{"))) > MAX_VALUES:
        message = f"the request body has more than {MAX_VALUES} commas and opening brackets; send fewer values"
        raise RequestError(message, code="too_many_values")
    try:
        body = schema.model_validate_json(raw)
    except ValidationError as error:
        raise _explain(error) from None
    unknown = rules.screen(body.extra)
    if body.stream_options is not None:
        if not body.stream:
            raise RequestError("stream_options is only allowed together with stream = true", param="stream_options")
        unknown += STREAM_OPTION_RULES.screen(body.stream_options.extra, "stream_options.")
    return body, unknown


def read_common(body: GenerationBody, ignored: list[str], serving: ServingConfig) -> dict[str, Any]:
    """Return the fields of ReadBody that both endpoints share. Raises RequestError."""
    return {
        "model": serving.resolve_model(body.model),
        "stream": bool(body.stream),
        "include_usage": body.include_usage,
        "ping_s": body.ping_s,
        "ignored": ignored,
        "priority": priority_of(body, serving.client_priority),
        "cache_salt": cache_salt_of(body),
    }


def require_json(request: Request) -> None:
    """Raise ContentTypeError unless the body is declared as JSON, which no form of a web page can do."""
    declared = request.headers.get("content-type", "")
    kind = declared.partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ContentTypeError(f"Content-Type is {declared[:100]!r}, but must be application/json")


def _explain(error: ValidationError) -> RequestError:
    """Describe the first validation error in one line."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])[:200]
    if first["type"] == "json_invalid":
        return RequestError(f"the request body is not valid JSON: {first['msg']}", code="invalid_json")
    if not where:
        return RequestError(f"the request body must be a JSON object: {first['msg']}", code="invalid_type")
    code = "missing_field" if first["type"] == "missing" else "invalid_type"
    return RequestError(f"{where}: {first['msg']}", param=where, code=code)
