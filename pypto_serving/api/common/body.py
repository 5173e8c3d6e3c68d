"""Read and parse request bodies into ReadBody; a malformed body is answered with a 4xx."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from pypto_serving.api.chat.formats import OutputFormat
from pypto_serving.api.generation.labels import Asked
from pypto_serving.api.generation.request import FittedPrompt, GenerationRequest, new_prompt_logprobs
from pypto_serving.api.http.errors import MAX_DROPPED_BODIES, OLLAMA_PATH, BodyTooLargeError
from pypto_serving.api.http.middleware import BODY_PARSED
from pypto_serving.errors import RequestError
from pypto_serving.types.guide import Guide
from pypto_serving.types.sampling import SamplingParams
from pypto_serving.util import brief, one_of

Generating = Literal["completions", "chat", "messages", "decisions", "responses", "ollama_chat", "ollama_generate"]
Answering = Literal["count_tokens", "input_tokens", "tokenize", "detokenize"]
Endpoint = Literal[Generating, Answering]
Prepare = Callable[[bytearray], bytearray]
"""Changes the bytes of a body before they are parsed."""
TRUNCATED_HEADER = "x-truncated-prompt-tokens"
IGNORED_HEADER = "x-ignored-fields"
MAX_VALUES = 2_000_000
"""Limit of commas and opening brackets of a body, counted before it is parsed."""
MAX_ANSWERED_TOKENS = 2_000_000
"""Limit of token ids listed in one answer."""
MAX_IGNORED, MAX_NAME_CHARS = 32, 64
"""List at most this many ignored fields of a request, with this many characters of each name; count the others."""
MAX_MESSAGES = 16_384
MAX_PING_S, MAX_SALT_CHARS = 3600, 1024
T = TypeVar("T")


Keys: TypeAlias = Mapping[str, "Known | None"]
Known: TypeAlias = Keys | Callable[[Mapping[str, Any]], Keys | None]
"""The keys of an object, or what finds them by the object; below a key with None, and below ANY, all are known."""
ANY = "*"


def keys(names: str, **inner: Known | None) -> Keys:
    """List keys, separated by spaces; `inner` are those with objects, or lists of objects, whose keys are known."""
    return dict.fromkeys(names.split()) | inner


def by_type(default: str = "", **kinds: Keys) -> Known:
    """Choose the keys of an object by its `type`; of another type all keys are known."""
    return lambda value: kinds.get(str(value.get("type", default)))


def unknown_keys(value: Any, known: Known | None, where: str) -> Iterator[str]:
    """Yield the paths of unknown keys of the object, or of the objects in a list, at `where`.

    Of keys that several objects of a list have, the first is named.
    """
    if isinstance(value, list):
        seen = set()
        for i, entry in enumerate(value):
            place = f"{where}[{i}]"
            for path in unknown_keys(entry, known, place):
                if (below := path[len(place) :]) not in seen:
                    seen.add(below)
                    yield path
    elif isinstance(value, Mapping | BaseModel):
        entries = dict(value)
        found = known(entries) if callable(known) else known
        if found is None:
            return
        for key, inner in entries.items():
            if key in found:
                yield from unknown_keys(inner, found[key], f"{where}.{key}")
            elif ANY not in found:
                yield f"{where}.{key}"


_TOLD = "type cache_control"
"""What any part of a text may have: prefixes are cached without being asked."""
PARTS = by_type(
    text=keys(f"{_TOLD} text"),
    refusal=keys(f"{_TOLD} refusal"),
    input_text=keys(f"{_TOLD} text"),
    output_text=keys(f"{_TOLD} text annotations logprobs"),
)
_SCHEMA = keys("type name description schema strict", json_schema=keys("name description schema strict"))
RESPONSE_FORMAT = by_type(text=keys("type"), json_object=_SCHEMA, json_schema=_SCHEMA)


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of the answer that the body asks for.

    - `request_id`: the end of the answer's id; None to let the server choose.
    - `n`: choices per prompt; the best ones if more are generated.
    - `usage`, `usage_so_far`: in a stream, send the usage with the last event, or the usage so far with each event.
    - `logprobs`: list this many most likely tokens for each token of the text; None for no log-probabilities.
    - `echo`: begin the text with the prompt.
    - `prompt_logprobs`: list this many most likely tokens for each token of the prompt, in a separate field.
    - `token_ids`: list the ids of prompt and output. `tokens_as_ids`: log-probabilities name tokens by their ids.
    - `truncation`: say how many tokens of the prompts were cut off.
    - `service_tier`: "default", the only tier, if the body names one.
    """

    request_id: str | None = None
    n: int = 1
    usage: bool = False
    usage_so_far: bool = False
    logprobs: int | None = None
    echo: bool = False
    prompt_logprobs: int | None = None
    token_ids: bool = False
    tokens_as_ids: bool = False
    truncation: bool = False
    service_tier: Literal["default"] | None = None


class Repeated(msgspec.Struct, frozen=True):
    """What a response repeats of its body (`echo`), and the `items` that it answers, as JSON; `store`: keep it.

    `own` are those that the body brought, by id.
    """

    echo: bytes
    items: bytes
    store: bool
    own: dict[str, bytes] = {}


class IgnoredFields(msgspec.Struct, frozen=True):
    """Unknown fields of a body: the first names, cut to MAX_NAME_CHARS, and the number of further ones."""

    names: list[str]
    num_more: int

    @classmethod
    def of(cls, names: list[str]) -> IgnoredFields:
        return cls([name[:MAX_NAME_CHARS] for name in names[:MAX_IGNORED]], max(0, len(names) - MAX_IGNORED))

    def and_also(self, names: list[str]) -> IgnoredFields:
        """Return these fields and others."""
        more = IgnoredFields.of([*self.names, *names])
        return IgnoredFields(more.names, more.num_more + self.num_more)

    def header(self) -> dict[str, str]:
        """Return the response header that lists these fields, with "?" for characters not allowed in headers."""
        if not self.names:
            return {}
        names = [re.sub(r"[^\w.\-\[\]]", "?", name, flags=re.ASCII) for name in self.names]
        more = [f"and {self.num_more} more"] if self.num_more else []
        return {IGNORED_HEADER: ", ".join(names + more)}


class ReadBody(msgspec.Struct, frozen=True, tag="read", kw_only=True):
    """A body after parsing, rendering and encoding.

    `new_parser` makes the parser of one choice's text; None means plain text. `params` are for all generated choices;
    `shown` says how many of these the answer has. `asked`: the questions of a decision.
    """

    model: str
    stream: bool = False
    ping_s: float | None = None
    ignored: IgnoredFields
    shown: Shown
    prompts: list[FittedPrompt]
    params: SamplingParams
    new_parser: OutputFormat | None = None
    priority: int = 0
    cache_salt: str = ""
    timeout_s: float | None = None
    asked: list[Asked] = []
    repeated: Repeated | None = None

    def generation(self, request_id: str) -> GenerationRequest:
        """Return the generation to run for this body."""
        return GenerationRequest(
            id=request_id,
            prompts=self.prompts,
            params=self.params,
            priority=self.priority,
            cache_salt=self.cache_salt,
            timeout_s=self.timeout_s,
            keep_token_ids=self.shown.token_ids or self.shown.usage_so_far,
            tokens_as_ids=self.shown.tokens_as_ids,
            prompt_logprobs=new_prompt_logprobs(self.prompts, self.params),
            thinking=None if self.new_parser is None else self.new_parser.thinking,
        )

    def headers(self) -> dict[str, str]:
        """Return response headers that list ignored fields and count truncated prompt tokens."""
        cut = {TRUNCATED_HEADER: str(sum(p.num_cut for p in self.prompts))} if self.shown.truncation else {}
        return self.ignored.header() | cut


class Answered(msgspec.Struct, frozen=True, tag="answered"):
    """The JSON answer to a body that needs no generation."""

    ignored: IgnoredFields
    content: bytes


def with_guide(read: ReadBody, guide: Guide) -> ReadBody:
    """Return a copy of a body whose outputs follow `guide`."""
    return replace(read, params=replace(read.params, guide=guide))


def check_num_answered(num_tokens: int, field: str | None) -> None:
    """Raise RequestError about `field` if `num_tokens` token ids are too many for one answer."""
    if num_tokens > MAX_ANSWERED_TOKENS:
        message = f"the answer would list {num_tokens} tokens, but may list {MAX_ANSWERED_TOKENS}; send less text"
        raise RequestError(message, param=field)


async def answer_read(request: Request, endpoint: Answering, prepare: Prepare | None = None) -> Response:
    """Answer a request whose answer follows from its body alone."""
    answered: Answered = await request.app.state.reading.answer(request, endpoint, prepare)
    return Response(answered.content, 200, answered.ignored.header(), "application/json")


def require_json(request: Request) -> None:
    """Raise RequestError unless Content-Type is JSON, which HTML forms cannot send.

    Ollama's clients need not declare their bodies, but browsers, which name the `Origin` of forms, must.
    """
    declared = request.headers.get("content-type", "")
    kind = declared.partition(";")[0].strip().lower()
    if request.scope["path"].startswith(OLLAMA_PATH) and "origin" not in request.headers:
        return
    if kind != "application/json" and not kind.endswith("+json"):
        message = f"Content-Type is {declared[:100]!r}, but must be application/json"
        raise RequestError(message, code="unsupported_media_type", status=415)


async def read_body(request: Request, limit: int) -> bytearray:
    """Read the whole body. Raises BodyTooLargeError above `limit` bytes.

    Before the error, receive and drop up to MAX_DROPPED_BODIES times the limit.
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


@contextmanager
def telling_when_parsed(request: Request) -> Iterator[None]:
    """After the block, tell the connection that the body is no longer in memory."""
    try:
        yield
    finally:
        request.scope.get(BODY_PARSED, lambda: None)()


def page_of(
    query: Mapping[str, str], entries: Sequence[T], ids: Sequence[str], default: int, most: int, shown: int
) -> dict[str, Any]:
    """Return the fields of a list: the entries after the query's `after`, as many as its `limit`, at most `shown`.

    `limit` is `default` if the query has none. Raises RequestError if it is above `most`.
    """
    limit, after = query.get("limit", str(default)), query.get("after")
    if not limit.isascii() or not limit.isdigit() or len(limit) > len(str(most)) or not 1 <= int(limit) <= most:
        raise RequestError(f"limit is {brief(limit)}, but must be between 1 and {most}", param="limit")
    if after is not None and after not in ids:
        raise RequestError(f"after is {brief(after)}, but there is no such id", param="after")
    start = 0 if after is None else ids.index(after) + 1
    end = start + min(int(limit), shown)
    first, last = (ids[start], ids[start:end][-1]) if ids[start:end] else (None, None)
    return {"data": entries[start:end], "has_more": end < len(ids), "first_id": first, "last_id": last}


class FieldRules(NamedTuple):
    """Rules for the fields of one endpoint.

    - `neutral`: unsupported fields, with the values that are accepted because they change nothing, as null does.
    - `accepted`: fields without an effect; any value is accepted.
    - `named`: the same, but values other than those listed, and null, are named like unknown fields.
    - `inner`: the keys that are known inside of fields; others are named, with their path.
    """

    neutral: Mapping[str, tuple[Any, ...]] = MappingProxyType({})
    accepted: frozenset[str] = frozenset()
    named: Mapping[str, tuple[Any, ...]] = MappingProxyType({})
    inner: Mapping[str, Known] = MappingProxyType({})


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    return value is None or any(value == allowed and _is_truth(value) == _is_truth(allowed) for allowed in neutral)


def _require_neutral(name: str, value: Any, neutral: tuple[Any, ...]) -> None:
    if _is_neutral(value, neutral):
        return
    if name in _SUCCESSORS:
        message = f"{name} is not supported by this server: it is the old form of {_SUCCESSORS[name]}; send that"
        raise RequestError(message, param=name, code="unsupported_field")
    advice = f"leave it out or set it to {one_of([*map(json.dumps, neutral)])}" if neutral else "leave it out"
    raise RequestError(
        f"{name} = {brief(value)} is not supported by this server; {advice}",
        param=name,
        code="unsupported_field",
    )


_SUCCESSORS = {"functions": "tools", "function_call": "tool_choice"}


def _is_truth(value: Any) -> bool:
    """Return whether `value` is true or false, which equal 1 and 0 in Python."""
    return isinstance(value, bool)


class Body(BaseModel):
    """Base of all bodies and of objects in them."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())
    rules: ClassVar[FieldRules] = FieldRules()

    @property
    def extra(self) -> dict[str, Any]:
        """Return the fields that are not in the schema."""
        return self.__pydantic_extra__ or {}

    def unknown_fields(self, known: frozenset[str] = frozenset(), prefix: str = "") -> list[str]:
        """Return the names in `extra` that are neither `known` nor in the rules, and those that are to be named.

        Raises RequestError if an unsupported field is not neutral.
        """
        unknown = []
        for name, value in self.extra.items():
            if name in known:
                continue
            if name in self.rules.neutral:
                _require_neutral(prefix + name, value, self.rules.neutral[name])
            elif name in self.rules.named:
                unknown += [] if _is_neutral(value, self.rules.named[name]) else [prefix + name]
            elif name not in self.rules.accepted:
                unknown.append(prefix + name)
        for name, keys in self.rules.inner.items():
            if (value := getattr(self, name)) is not None:
                unknown += unknown_keys(value, keys, prefix + name)
        return unknown


class StreamBody(Body):
    """Fields of an answer that may be a stream."""

    stream: bool | None = None
    sse_ping_interval: int | None = Field(None, ge=-1, le=MAX_PING_S)

    @property
    def ping_s(self) -> float | None:
        """Return the seconds without an event after which a stream sends a comment; None for never."""
        return self.sse_ping_interval if self.sse_ping_interval and self.sse_ping_interval > 0 else None


AnyBody = TypeVar("AnyBody", bound=Body)


def parse_json(raw: bytes | bytearray, schema: type[AnyBody]) -> AnyBody:
    """Return the body as `schema`. Raises RequestError naming the field at fault."""
    if len(raw) > MAX_VALUES and sum(map(raw.count, (b",", b"[", b"{"))) > MAX_VALUES:
        message = f"the request body has more than {MAX_VALUES} commas and opening brackets; send fewer values"
        raise RequestError(message, code="too_many_values")
    try:
        return schema.model_validate_json(raw)
    except ValidationError as error:
        raise explain(error) from None


_ALLOWED: Mapping[str, str] = {
    "string_type": "be a string",
    "bool_type": "be true or false",
    "int_type": "be an integer",
    "float_type": "be a number",
    "finite_number": "be a finite number",
    "list_type": "be a list",
    "dict_type": "be an object",
    "model_type": "be an object",
    "greater_than_equal": "be at least {ge} (greater_than_equal)",
    "less_than_equal": "be at most {le} (less_than_equal)",
    "literal_error": "be {expected}",
    "too_long": "have at most {max_length} entries",
}
"""Words for what a value must be, by the type of pydantic's error."""


def explain(error: ValidationError) -> RequestError:
    """Describe the first validation error in one line."""
    first = error.errors(include_url=False)[0]
    kind, words = first["type"], first["msg"]
    if kind == "json_invalid":
        return RequestError(
            f"the request body is not valid JSON: {words.removeprefix('Invalid JSON: ')}", code="invalid_json"
        )
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])[1:201]
    if not where:
        return RequestError(f"the request body is {brief(first['input'])}, but must be an object", code="invalid_type")
    if kind == "missing":
        return RequestError(f"{where} is missing", param=where, code="missing_field")
    if kind in _ALLOWED:
        allowed = _ALLOWED[kind].format(**first.get("ctx", {}))
        words = f"is {brief(first['input'])}, but must {allowed}"
    return RequestError(f"{where} {words}", param=where, code="invalid_type")
