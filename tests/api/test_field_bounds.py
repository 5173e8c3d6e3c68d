"""Each bound of a field of responses, messages and batches: at it a request is answered, beyond it refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from pydantic import BaseModel

from pypto_serving.api.anthropic.messages_body import MessagesBody
from pypto_serving.api.batch.schemas import MAX_METADATA, MAX_METADATA_CHARS, BatchBody
from pypto_serving.api.chat.tools import MAX_DEPTH, MAX_NAME_CHARS, MAX_TOOLS
from pypto_serving.api.common.body import MAX_MESSAGES, MAX_PING_S
from pypto_serving.api.responses import response_body
from pypto_serving.api.responses.response_body import MAX_ID_CHARS, ResponsesBody
from pypto_serving.api.settings import load_serving_config
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.types.sampling import INT32_MAX, MAX_LOGPROBS, MAX_STOP_CHARS, MAX_STOPS
from tests.api.anthropic.talking import TEMPLATE
from tests.api.checkpoint import write_checkpoint
from tests.api.conftest import NAMES, new_engine
from tests.api.running import RunningServer

RESPONSES, MESSAGES, BATCHES = "/v1/responses", "/v1/messages", "/v1/batches"
SCHEMAS: dict[str, type[BaseModel]] = {RESPONSES: ResponsesBody, MESSAGES: MessagesBody, BATCHES: BatchBody}
BOUNDS = frozenset({"maxLength", "maxItems", "maxProperties", "minimum", "maximum", "exclusiveMinimum"})
HELLO = {"role": "user", "content": "hello"}
LOGPROBS = {"include": ["message.output_text.logprobs"]}


class Bound(NamedTuple):
    """A field with a value at its bound, and one beyond it; `beside` are fields that it needs.

    `place` is what the refusal names, by default the field, and `status` that of the answer at the bound.
    """

    path: str
    field: str
    at: Any
    beyond: Any
    place: str = ""
    beside: Mapping[str, Any] = MappingProxyType({})
    status: int = 200


def deep(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"a": value}
    return value


def function(path: str, name: str = "now", schema: Any = None) -> dict[str, Any]:
    """A tool in the form of an endpoint."""
    if path == MESSAGES:
        return {"name": name, "input_schema": schema or {}}
    return {"type": "function", "name": name, "parameters": schema or {}}


def functions(path: str, count: int) -> list[dict[str, Any]]:
    return [function(path, f"f{i}") for i in range(count)]


def allowed(count: int) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f0"}] * count}


def form(name: str) -> dict[str, Any]:
    return {"format": {"type": "json_schema", "name": name, "schema": {"type": "object"}}}


def called(levels: int) -> list[dict[str, Any]]:
    """A conversation with a call whose arguments are so deep."""
    call = {"type": "tool_use", "id": "a", "name": "now", "input": deep(levels)}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "x"}
    return [HELLO, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]


def entries(count: int) -> dict[str, str]:
    return {str(i): "" for i in range(count)}


def tool_bounds(path: str, name: str, schema: str) -> list[Bound]:
    """Those of tools, with the places of their name and their schema."""
    long, longer = ("x" * (MAX_NAME_CHARS + more) for more in (0, 1))
    level = MAX_DEPTH
    return [
        Bound(path, "tools", functions(path, MAX_TOOLS), functions(path, MAX_TOOLS + 1)),
        Bound(path, "tools", [function(path, long)], [function(path, longer)], name),
        Bound(path, "tools", [function(path, schema=deep(level))], [function(path, schema=deep(level + 1))], schema),
    ]


CHARS, LONG = response_body.MAX_KEY_CHARS, response_body.MAX_VALUE_CHARS
SILENT = {"type": "reasoning", "summary": []}
CASES = [
    Bound(RESPONSES, "sse_ping_interval", MAX_PING_S, MAX_PING_S + 1),
    Bound(RESPONSES, "sse_ping_interval", -1, -2),
    Bound(RESPONSES, "previous_response_id", "x" * MAX_ID_CHARS, "x" * (MAX_ID_CHARS + 1), status=404),
    Bound(RESPONSES, "max_output_tokens", 1, 0),
    Bound(RESPONSES, "max_output_tokens", 1, INT32_MAX + 1),
    Bound(RESPONSES, "temperature", 0, -0.1),
    Bound(RESPONSES, "temperature", 100, 100.1),
    Bound(RESPONSES, "top_p", 1e-6, 0),
    Bound(RESPONSES, "top_p", 1, 1.01),
    Bound(RESPONSES, "top_logprobs", 0, -1, beside=LOGPROBS),
    Bound(RESPONSES, "top_logprobs", MAX_LOGPROBS, MAX_LOGPROBS + 1, beside=LOGPROBS),
    Bound(RESPONSES, "include", LOGPROBS["include"] * 16, LOGPROBS["include"] * 17),
    Bound(RESPONSES, "metadata", entries(response_body.MAX_METADATA), entries(response_body.MAX_METADATA + 1)),
    Bound(RESPONSES, "metadata", {"x" * CHARS: ""}, {"x" * (CHARS + 1): ""}),
    Bound(RESPONSES, "metadata", {"x": "x" * LONG}, {"x": "x" * (LONG + 1)}),
    Bound(RESPONSES, "text", form("x" * CHARS), form("x" * (CHARS + 1)), "text.format.name"),
    Bound(RESPONSES, "text", form("x"), form(""), "text.format.name"),
    Bound(RESPONSES, "input", [HELLO, *[SILENT] * (MAX_MESSAGES - 1)], [HELLO, *[SILENT] * MAX_MESSAGES]),
    *tool_bounds(RESPONSES, "tools[0].name", "tools[0].parameters"),
    Bound(
        RESPONSES,
        "tool_choice",
        allowed(MAX_TOOLS),
        allowed(MAX_TOOLS + 1),
        "tool_choice.tools",
        {"tools": functions(RESPONSES, 1)},
    ),
    Bound(
        MESSAGES, "messages", [HELLO, *[{**HELLO, "content": ""}] * (MAX_MESSAGES - 1)], [HELLO] * (MAX_MESSAGES + 1)
    ),
    Bound(MESSAGES, "messages", called(MAX_DEPTH), called(MAX_DEPTH + 1), "messages[1].content[0].input"),
    Bound(MESSAGES, "max_tokens", 0, -1),
    Bound(MESSAGES, "max_tokens", INT32_MAX, INT32_MAX + 1),
    Bound(MESSAGES, "stop_sequences", ["a"] * MAX_STOPS, ["a"] * (MAX_STOPS + 1)),
    Bound(MESSAGES, "stop_sequences", ["a" * MAX_STOP_CHARS], ["a" * (MAX_STOP_CHARS + 1)]),
    Bound(MESSAGES, "stop_sequences", ["a"], [""]),
    Bound(MESSAGES, "temperature", 0, -0.1),
    Bound(MESSAGES, "temperature", 100, 100.1),
    Bound(MESSAGES, "top_p", 1e-6, 0),
    Bound(MESSAGES, "top_p", 1, 1.01),
    Bound(MESSAGES, "top_k", -1, -2),
    Bound(MESSAGES, "top_k", INT32_MAX, INT32_MAX + 1),
    *tool_bounds(MESSAGES, "tools[0].name", "tools[0].input_schema"),
    *(
        Bound(
            MESSAGES,
            "thinking",
            {"type": "enabled", "budget_tokens": at},
            {"type": "enabled", "budget_tokens": beyond},
            "thinking.budget_tokens",
            {"max_tokens": INT32_MAX},
        )
        for at, beyond in ((1, 0), (INT32_MAX - 1, INT32_MAX + 1), (INT32_MAX - 1, INT32_MAX))
    ),
    Bound(
        MESSAGES,
        "tool_choice",
        {"type": "tool", "name": "x" * MAX_NAME_CHARS},
        {"type": "tool", "name": "x" * (MAX_NAME_CHARS + 1)},
        "tool_choice.name",
        {"tools": [function(MESSAGES, "x" * MAX_NAME_CHARS)]},
    ),
    Bound(BATCHES, "metadata", entries(MAX_METADATA), entries(MAX_METADATA + 1)),
    Bound(BATCHES, "metadata", {"x" * MAX_METADATA_CHARS: ""}, {"x" * (MAX_METADATA_CHARS + 1): ""}),
    Bound(BATCHES, "metadata", {"x": "x" * MAX_METADATA_CHARS}, {"x": "x" * (MAX_METADATA_CHARS + 1)}),
]


@pytest.fixture(scope="module")
def bounded(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Iterator[RunningServer]:
    folder = write_checkpoint(tmp_path_factory.mktemp("bounds"), template=TEMPLATE)
    serving = load_serving_config(folder, served_model_names=NAMES, batch_dir=str(tmp_path_factory.mktemp("batches")))
    server = RunningServer(new_engine(tokenizer, max_model_len=1 << 18), serving)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def bodies(bounded: RunningServer) -> dict[str, dict[str, Any]]:
    """A body of each endpoint without anything unusual."""
    file = bounded.openai().files.create(file=("in.jsonl", b"{}"), purpose="batch")
    return {
        RESPONSES: {"model": "tiny", "input": "hello"},
        MESSAGES: {"model": "tiny", "messages": [HELLO], "max_tokens": 4},
        BATCHES: {"input_file_id": file.id, "endpoint": "/v1/completions"},
    }


@pytest.mark.parametrize("bound", CASES, ids=[f"{case.path[4:]}-{case.place or case.field}" for case in CASES])
def test_bounds_hold_to_the_last(bounded: RunningServer, bodies: dict[str, dict[str, Any]], bound: Bound) -> None:
    body = {**bodies[bound.path], **bound.beside}
    good = bounded.http.post(bound.path, json=body | {bound.field: bound.at})
    assert good.status_code == bound.status, good.text
    bad = bounded.http.post(bound.path, json=body | {bound.field: bound.beyond})
    assert bad.status_code == 400, bad.text
    error, place = bad.json()["error"], bound.place or bound.field
    assert error["message"].startswith(place) and error.get("param", place) == place
    assert len(error["message"]) < 500, "what is too long is not repeated"


def bounded_fields(schema: Any) -> Iterator[str]:
    """The fields of a body's schema that have a bound, at any depth."""
    for field, described in schema["properties"].items():
        if any(BOUNDS & part.keys() for part in parts(described)):
            yield field


def parts(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from parts(inner)


@pytest.mark.parametrize("path", SCHEMAS)
def test_each_bound_that_is_described_is_tried(path: str) -> None:
    described = set(bounded_fields(SCHEMAS[path].model_json_schema()))
    assert described <= {case.field for case in CASES if case.path == path}
