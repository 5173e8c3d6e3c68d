"""Parse request bodies; every malformed one is a 4xx. What they say is a ReadBody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol, TypeVar

import msgspec
from msgspec.structs import replace
from pydantic import ValidationError
from starlette.requests import Request

from pypto_serving.api.chat.formats import OutputFormat
from pypto_serving.api.common.fields import STREAM_OPTION_RULES, FieldRules, IgnoredFields
from pypto_serving.api.common.invalid import explain
from pypto_serving.api.common.params import cache_salt_of, priority_of
from pypto_serving.api.common.schemas import Body, GenerationBody
from pypto_serving.api.common.shown import Shown
from pypto_serving.api.generation.labels import Asked
from pypto_serving.api.generation.request import FittedPrompt, GenerationRequest, new_scores
from pypto_serving.api.http.errors import MAX_DROPPED_BODIES, BodyTooLargeError, ContentTypeError
from pypto_serving.api.http.middleware import BODY_PARSED
from pypto_serving.api.settings import ServingConfig
from pypto_serving.errors import RequestError
from pypto_serving.types.guide import Guide
from pypto_serving.types.sampling import SamplingParams

MAX_VALUES = 2_000_000
"""Bounds the values of a body before it is parsed, by the characters that come with each."""
MAX_ANSWERED_TOKENS = 2_000_000
"""Bounds the token ids that one answer lists."""
TRUNCATED_HEADER = "x-truncated-prompt-tokens"
AnyBody = TypeVar("AnyBody", bound=Body)
BodyT = TypeVar("BodyT", bound=GenerationBody)
Generating = Literal["completions", "chat", "messages", "decisions", "responses"]
Prepare = Callable[[bytearray], bytearray]
"""Changes a body before it is read."""
Answering = Literal["count_tokens", "tokenize", "detokenize"]
Endpoint = Literal[Generating, Answering]


class Repeated(msgspec.Struct, frozen=True):
    """What a response repeats of its body, and the items that it answers, as JSON; `store`: it is to be kept."""

    echo: bytes
    items: bytes
    store: bool


class ReadBody(msgspec.Struct, frozen=True, tag="read", kw_only=True):
    """A body after parsing, rendering and encoding.

    `new_parser` makes the parser of one choice's text; None means plain text. `params` are those of what is made,
    which may be more than what is `shown`. `asked` are the questions of a decision.
    """

    model: str
    stream: bool
    ping_s: float | None
    ignored: IgnoredFields
    shown: Shown
    prompts: list[FittedPrompt]
    params: SamplingParams
    new_parser: OutputFormat | None = None
    priority: int
    cache_salt: str
    timeout_s: float | None = None
    asked: list[Asked] = []
    repeated: Repeated | None = None

    def generation(self, request_id: str) -> GenerationRequest:
        """Return what to generate."""
        return GenerationRequest(
            id=request_id,
            prompts=self.prompts,
            params=self.params,
            priority=self.priority,
            cache_salt=self.cache_salt,
            timeout_s=self.timeout_s,
            keep_token_ids=self.shown.token_ids or self.shown.usage_so_far,
            tokens_as_ids=self.shown.tokens_as_ids,
            scores=new_scores(self.prompts, self.params),
            thinking=None if self.new_parser is None else self.new_parser.thinking,
        )

    def headers(self) -> dict[str, str]:
        """Return the response headers that say what was ignored or cut off."""
        cut = {TRUNCATED_HEADER: str(sum(p.num_cut for p in self.prompts))} if self.shown.truncation else {}
        return self.ignored.header() | cut


class Answered(msgspec.Struct, frozen=True, tag="answered"):
    """The JSON that answers a body, where there is nothing to generate."""

    ignored: IgnoredFields
    content: bytes


def with_guide(read: ReadBody, guide: Guide) -> ReadBody:
    """Return a body whose outputs follow `guide`."""
    return replace(read, params=replace(read.params, guide=guide))


def check_num_answered(num_tokens: int, field: str | None) -> None:
    """Raise RequestError if an answer cannot list so many token ids, which come from `field`."""
    if num_tokens > MAX_ANSWERED_TOKENS:
        message = f"the answer would list {num_tokens} tokens, but may list {MAX_ANSWERED_TOKENS}; send less text"
        raise RequestError(message, param=field)


class BodySource(Protocol):
    """Where the bodies of requests are read."""

    async def read(self, request: Request, endpoint: Generating, prepare: Prepare | None = None) -> ReadBody:
        """Return what the body says, once `prepare` changed it.

        Raises RequestError, and ClientDisconnect if the client leaves before.
        """

    async def answer(self, request: Request, endpoint: Answering) -> Answered:
        """Return the answer to the body. Raises like `read`."""


@contextmanager
def telling_when_parsed(request: Request) -> Iterator[None]:
    """Tell the connection after the block that the body needs no more memory."""
    try:
        yield
    finally:
        request.scope.get(BODY_PARSED, lambda: None)()


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


def parse_json(raw: bytes | bytearray, schema: type[AnyBody]) -> AnyBody:
    """Return the body as `schema`. Raises RequestError naming the field at fault."""
    if len(raw) > MAX_VALUES and sum(map(raw.count, (b",", b"[", b"{"))) > MAX_VALUES:
        message = f"the request body has more than {MAX_VALUES} commas and opening brackets; send fewer values"
        raise RequestError(message, code="too_many_values")
    try:
        return schema.model_validate_json(raw)
    except ValidationError as error:
        raise explain(error) from None


def parse_body(raw: bytes | bytearray, schema: type[BodyT], rules: FieldRules) -> tuple[BodyT, IgnoredFields]:
    """Return the body as `schema` and its ignored fields. Raises RequestError naming the field at fault."""
    body = parse_json(raw, schema)
    unknown = rules.screen(body.extra)
    if body.stream_options is not None:
        if not body.stream:
            raise RequestError("stream_options is only allowed together with stream = true", param="stream_options")
        unknown += STREAM_OPTION_RULES.screen(body.stream_options.extra, "stream_options.")
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


def require_json(request: Request) -> None:
    """Raise ContentTypeError unless the body is declared as JSON, which no form of a web page can do."""
    declared = request.headers.get("content-type", "")
    kind = declared.partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ContentTypeError(f"Content-Type is {declared[:100]!r}, but must be application/json")
