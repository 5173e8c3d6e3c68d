"""What the bundled model does with functions and with requests for JSON, asked of the engine: no grammar helps it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from bundled_model.evaluation import call_turns, earlier_tool_chats, encoded, json_turns, plain_turns, result_rows
from bundled_model.tokenizer import Encoder
from bundled_model.tools import TOOLS
from tokenizers import Tokenizer

from pypto_serving import LLM, SamplingParams
from pypto_serving.setup.locate import BUNDLED
from tests.e2e.questions import user
from tests.e2e.server import Server

pytestmark = pytest.mark.e2e

GREEDY = SamplingParams(temperature=0, max_tokens=400)
ENCODER = Encoder(Tokenizer.from_file(str(BUNDLED / "tokenizer.json")))
(OFFER,) = earlier_tool_chats(ENCODER, tokens=0, seed=0)


def asked(kind: str, count: int) -> tuple[list[int], list[tuple[list[int], list[bool]]]]:
    """What comes before unseen questions of a kind, and their rows."""
    if kind == "JSON":
        return [], encoded(ENCODER, json_turns(count, seed=3))
    if kind == "results":
        return OFFER, result_rows(ENCODER, count, seed=3)
    turns = plain_turns(count, seed=3) if kind == "no call needed" else call_turns(kind, count, seed=3)
    return OFFER, encoded(ENCODER, turns)


WRONG = {
    "calculate": {500: 3, 40: 1},
    "get_time": {500: 0, 40: 0},
    "two calls": {500: 0, 40: 0},
    "results": {500: 7, 40: 0},
    "no call needed": {500: 11, 40: 3},
    "JSON": {500: 78, 40: 5},
}
"""How many of 500 and of 40 unseen questions of each kind these weights get wrong."""


@pytest.fixture
def llm(bundled_llm: LLM) -> LLM:
    return bundled_llm


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.soak)])
def test_unseen_questions(llm: LLM, kind: str, count: int) -> None:
    earlier, rows = asked(kind, count)
    prompts = [earlier + ids[: wanted.index(True)] for ids, wanted in rows]
    expected = [ENCODER.tokenizer.decode([i for i, w in zip(*row, strict=True) if w]) for row in rows]
    results = llm.generate(prompts, GREEDY, progress=False)
    found = [result.outputs[0].text for result in results]
    wrong = [pair for pair in zip(found, expected, strict=True) if pair[0] != pair[1]]
    assert len(wrong) <= WRONG[kind][count], wrong[:10]


@pytest.fixture
def server(bundled_server: Server) -> Server:
    return bundled_server


def chat(server: Server, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    answer = server.http.post("/v1/chat/completions", json={"messages": messages, "temperature": 0, **fields})
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def function(call: dict[str, Any]) -> tuple[str, Any]:
    return call["function"]["name"], json.loads(call["function"]["arguments"])


def test_a_call_and_its_result_over_http(server: Server) -> None:
    messages = [user("What time is it in Paris?")]
    asked = chat(server, messages, tools=TOOLS)
    (call,) = asked["message"]["tool_calls"]
    assert asked["finish_reason"] == "tool_calls" and function(call) == ("get_time", {"city": "Paris"})
    result = {"role": "tool", "tool_call_id": call["id"], "content": "14:05"}
    told = chat(server, [*messages, asked["message"], result], tools=TOOLS)
    assert told["finish_reason"] == "stop" and told["message"]["content"] == "It is 14:05 in Paris."


def test_its_own_sums_need_no_call(server: Server) -> None:
    assert chat(server, [user("What is 37+45?")], tools=TOOLS)["message"]["content"] == "37 + 45 = 82"


def test_a_required_call_means_what_was_asked(server: Server) -> None:
    asked = chat(server, [user("What is 1234 * 99?")], tools=TOOLS, tool_choice="required")
    (call,) = asked["message"]["tool_calls"]
    assert function(call) == ("calculate", {"expression": "1234 * 99"})


def test_a_schema_and_json_on_request_agree(server: Server) -> None:
    numbers = {name: {"type": "integer"} for name in ("a", "b", "result")}
    schema = {"type": "object", "properties": numbers, "required": [*numbers], "additionalProperties": False}
    asked = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema, "strict": True}}
    for response_format in ({"type": "text"}, {"type": "json_object"}, asked):
        said = chat(server, [user("What is 12+30? Answer in JSON.")], response_format=response_format)
        assert json.loads(said["message"]["content"]) == {"a": 12, "b": 30, "result": 42}
