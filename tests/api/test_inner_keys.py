"""Keys inside the objects of a request: unknown ones are named with their path, and a schema counts where it stands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pypto_serving.api.common.body import ANY, by_type, keys, unknown_keys
from tests.api.checkpoint import write_checkpoint
from tests.api.running import CHAT, RunningServer
from tests.api.templates import HERMES
from tests.api.tool_samples import HELLO

COMPLETIONS, RESPONSES, MESSAGES = "/v1/completions", "/v1/responses", "/v1/messages"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "now", "returns": 1}, "defer": True}
CALL = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}", "strict": True}, "extra": 1}
ITEM = {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}", "thought": "x"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "1"}


def test_paths() -> None:
    known = keys("a", b=keys("c"), d=by_type("x", x=keys("type y"), z=keys(ANY, y=keys("q"))))
    value = {"a": {"any": 1}, "b": [{"c": 1}, {"e": 1}, {"e": 2, "f": 1}], "d": {"y": {}, "n": 1}, "g": 1, "h": None}
    assert list(unknown_keys(value, known, "it")) == ["it.b[1].e", "it.b[2].f", "it.d.n", "it.g", "it.h"]
    assert list(unknown_keys({"d": {"type": "z", "n": 1, "y": {"r": 1}}}, known, "it")) == ["it.d.y.r"]
    assert not list(unknown_keys({"d": {"type": ["odd"], "n": 1}}, known, "it"))
    assert not list(unknown_keys("text", known, "it"))


NAMED: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "lang": "en", "cache_control": {}}]}]},
        "messages[0].content[0].lang",
    ),
    (
        CHAT,
        {"messages": [HELLO, {"role": "assistant", "name": "x", "tool_calls": [CALL]}, HELLO]},
        "messages[1].tool_calls[0].function.strict, messages[1].tool_calls[0].extra",
    ),
    (CHAT, {"tools": [TOOL, {**TOOL, "function": {"name": "then"}}]}, "tools[0].defer"),
    (CHAT, {"tools": [TOOL], "tool_choice": {**TOOL, "why": 1}}, "tools[0].defer, tool_choice.function.returns, "
     "tool_choice.defer, tool_choice.why"),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "x": 1}, "y": 1}},
        "response_format.json_schema.x, response_format.y",
    ),
    (RESPONSES, {"text": {"format": {"type": "text", "n": 1}, "verbosity": "low"}}, "text.format.n, text.verbosity"),
    (RESPONSES, {"reasoning": {"effort": None, "mode": "x"}}, "reasoning.mode"),
    (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a", "n": 1}]}, ITEM, RESULT]},
        "input[0].content[0].n, input[1].thought",
    ),
    (MESSAGES, {"system": [{"type": "text", "text": "a", "x": 1, "cache_control": {}}]}, "system[0].x"),
    (
        MESSAGES,
        {"tools": [{"name": "now", "input_schema": {}, "input_examples": []}], "tool_choice": {"type": "auto", "x": 1}},
        "tools[0].input_examples, tool_choice.x",
    ),
    (MESSAGES, {"thinking": {"type": "disabled", "depth": 1}, "output_config": {"task_budget": {}}},
     "thinking.depth, output_config.task_budget"),
]  # fmt: skip


@pytest.fixture
def calling(start: Callable[..., RunningServer], tmp_path: Path) -> RunningServer:
    return start(write_checkpoint(tmp_path, template=HERMES), config={"max_model_len": 4096})


def post(server: RunningServer, path: str, fields: dict[str, Any]) -> Any:
    given: dict[str, Any] = {"prompt": "a"} if path == COMPLETIONS else {"messages": [HELLO]}
    given = {"input": "a", "store": False} if path == RESPONSES else given
    limit = {"max_output_tokens": 2} if path == RESPONSES else {"max_tokens": 2}
    return server.post(path, {"model": "tiny", **given, **limit, **fields})


@pytest.mark.parametrize(("path", "fields", "names"), NAMED)
def test_unknown_keys_are_named_with_their_path(
    calling: RunningServer, path: str, fields: dict[str, Any], names: str
) -> None:
    response = post(calling, path, fields)
    assert response.status_code == 200, response.text
    assert response.headers["x-ignored-fields"] == names


ENFORCED: list[tuple[str, Callable[[Any], dict[str, Any]]]] = [
    (CHAT, lambda schema: {"response_format": {"type": "json_object", "schema": schema}}),
    (COMPLETIONS, lambda schema: {"response_format": {"type": "json_object", "schema": schema}}),
    (CHAT, lambda schema: {"response_format": {"type": "json_schema", "schema": schema}}),
    (CHAT, lambda schema: {"response_format": {"type": "json_object", "json_schema": {"schema": schema}}}),
    (RESPONSES, lambda schema: {"text": {"format": {"type": "json_object", "schema": schema}}}),
    (
        RESPONSES,
        lambda schema: {"text": {"format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}},
    ),
    (MESSAGES, lambda schema: {"output_config": {"format": {"type": "json_schema", "schema": schema}}}),
    (MESSAGES, lambda schema: {"output_format": {"type": "json_schema", "schema": schema}}),
]


@pytest.mark.parametrize(("path", "fields"), ENFORCED)
def test_a_schema_is_enforced_where_it_stands(
    server: RunningServer, path: str, fields: Callable[[Any], dict[str, Any]]
) -> None:
    response = post(server, path, fields(SCHEMA))
    assert response.status_code == 200, response.text
    assert "x-ignored-fields" not in response.headers
    guide = server.engine.requests[-1].params.guide
    assert guide is not None and guide.grammar is not None and '"required": ["a"]' in guide.grammar.text
    assert post(server, path, fields([1])).status_code == 400
