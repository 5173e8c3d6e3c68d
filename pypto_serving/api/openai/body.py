"""From the bytes of a request body to a checked schema. Whatever a client sends, the answer is a 4xx, not a crash."""

from __future__ import annotations

from typing import TypeVar

from pydantic import ValidationError
from starlette.requests import Request

from pypto_serving.api.errors import BodyTooLargeError
from pypto_serving.api.openai.fields import STREAM_OPTION_RULES, FieldRules
from pypto_serving.api.openai.schemas import GenerationBody
from pypto_serving.api.service import Service
from pypto_serving.errors import RequestError

BodyT = TypeVar("BodyT", bound=GenerationBody)


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body; raises BodyTooLargeError above `limit` bytes.

    A body that is too large is still received, up to four times the limit, and thrown away: a client that is
    cut off while it sends would not read our answer.
    """
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= limit:
            chunks.append(chunk)
        elif size > 4 * limit:
            break
        else:
            chunks.clear()
    if size > limit:
        raise BodyTooLargeError(f"the request body has more than {limit} bytes, the limit of this server; send less")
    return b"".join(chunks)


async def parse_body(request: Request, schema: type[BodyT], rules: FieldRules) -> tuple[BodyT, list[str]]:
    """The body as `schema`, and the names of ignored fields; raises RequestError naming what is wrong."""
    service: Service = request.app.state.service
    raw = await read_body(request, service.serving.max_body_bytes)
    try:
        body = schema.model_validate_json(raw)
    except ValidationError as error:
        raise _explain(error) from None
    unknown = rules.screen(body.extra)
    if body.stream_options is not None:
        if not body.stream:
            raise RequestError("stream_options is only allowed together with stream = true", param="stream_options")
        unknown += STREAM_OPTION_RULES.screen(body.stream_options.extra, "stream_options.")
    service.warn_ignored(unknown)
    return body, unknown


def _explain(error: ValidationError) -> RequestError:
    """The first complaint, in one line."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])[:200]
    if first["type"] == "json_invalid":
        return RequestError(f"the request body is not valid JSON: {first['msg']}", code="invalid_json")
    if not where:
        return RequestError(f"the request body must be a JSON object: {first['msg']}", code="invalid_type")
    code = "missing_field" if first["type"] == "missing" else "invalid_type"
    return RequestError(f"{where}: {first['msg']}", param=where, code=code)
