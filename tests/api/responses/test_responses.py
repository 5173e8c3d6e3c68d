"""Responses by OpenAI's own client, and each answer and event against its published types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest
from pydantic import BaseModel

from pypto_serving.api.chat.leaving_out import LeftOut
from pypto_serving.api.common.body import MAX_MESSAGES
from pypto_serving.api.responses.endpoints import Kept, ResponseStore
from pypto_serving.api.responses.history import MAX_RESPONSE_BYTES, read_history, read_items
from pypto_serving.api.responses.response_body import read_response, with_earlier
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.errors import RequestError
from tests.api.anthropic.talking import CITY, SAID
from tests.api.chat_events import prompt_of
from tests.api.responses.answering import PATH, Thinks, call_of, create, stream
from tests.api.responses.conftest import MAX_MODEL_LEN
from tests.api.running import RunningServer
from tests.api.scripted_engine import WAIT_S, Script

WEATHER = {"type": "function", "name": "get_weather", "parameters": CITY, "strict": True}
NOW = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}
THINKS: Any = {"effort": "high"}


@pytest.fixture
def client(thinking_server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{thinking_server.url}/v1", api_key="a", max_retries=0, timeout=WAIT_S) as client:
        yield client


def test_whole_and_streamed_are_of_the_published_types(thinks: Thinks) -> None:
    server = thinks(SAID, cached=3)
    whole = create(server, tools=[WEATHER, NOW], reasoning=THINKS)
    events = stream(server, "/responses", tools=[WEATHER, NOW], reasoning=THINKS)
    assert [event["type"] for event in events[:3]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
    ]
    done = events[-1]["response"]
    assert (events[-1]["type"], done["status"]) == ("response.completed", "completed")
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [item["type"] for item in whole["output"]] == [item["type"] for item in done["output"]] == kinds
    assert [e["item"] for e in events if e["type"] == "response.output_item.done"] == done["output"]
    said = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    assert said == whole["output"][1]["content"][0]["text"] == done["output"][1]["content"][0]["text"]
    assert whole["usage"] == done["usage"] and whole["usage"]["input_tokens_details"]["cached_tokens"] == 3
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


def test_an_incomplete_response(thinks: Thinks) -> None:
    server = thinks("good", finish="length")
    whole = create(server, max_output_tokens=1)
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert stream(server, max_output_tokens=1)[-1]["type"] == "response.incomplete"


def test_the_client(thinks: Thinks, client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    class City(BaseModel):
        name: str

    server = thinks("good day")
    first = client.responses.create(
        model="tiny", input="hello", instructions="be brief", metadata={"a": "b"}, reasoning=THINKS
    )
    assert first.output_text == "good day"
    before = prompt_of(server, tokenizer)
    second = client.responses.create(
        model="tiny", input="more", instructions="be brief", previous_response_id=first.id, reasoning=THINKS
    )
    assert prompt_of(server, tokenizer).startswith(before + "good day"), "a prefix that the cache has"
    assert client.responses.retrieve(second.id).output_text == "good day"
    listed = client.responses.input_items.list(second.id, limit=2, order="asc")
    assert [item.id for item in listed][1] == first.output[0].id and len(list(listed)) == 3
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(first.id)
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with client.responses.stream(model="tiny", input="hello", store=False) as streamed:
        assert streamed.get_final_response().output_text == "good day"
    thinks('{"name": "Rome"}')
    assert client.responses.parse(model="tiny", input="hello", text_format=City).output_parsed == City(name="Rome")
    assert server.engine.requests[-1].params.guide is not None


PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" LF'},
}
HUNK = '*** Begin Patch\n+a "quoted" é\n'


def test_custom_tools_take_text(thinks: Thinks, tokenizer: Tokenizer) -> None:
    """As agents that edit files send them, beside tools that only OpenAI has, of which the model hears nothing."""
    both = call_of("apply_patch", msgspec.json.encode({"input": HUNK}).decode()) + call_of("now", "{}")
    server = thinks(both)
    asked: dict[str, Any] = {"tools": [PATCH, {"type": "web_search"}, {"type": "local_shell"}, NOW]}
    events = stream(server, **asked)
    prompt = prompt_of(server, tokenizer)
    assert "Begin Patch" in prompt and "Edit files." in prompt and "web_search" not in prompt
    whole, done = create(server, **asked), events[-1]["response"]
    assert [tool["type"] for tool in whole["tools"]] == ["custom", "function"]
    for patch, now in (whole["output"], done["output"]):
        assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", HUNK)
        assert (now["type"], now["arguments"]) == ("function_call", "{}")
    told = [e for e in events if e["type"].startswith("response.custom_tool_call_input")]
    assert [e.get("delta", e.get("input")) for e in told] == [HUNK, HUNK]
    response = server.http.post(PATH, json={"model": "tiny", "input": "hello", **asked})
    assert response.headers["x-ignored-fields"] == "tools.local_shell, tools.web_search"
    result = {"type": "custom_tool_call_output", "call_id": done["output"][0]["call_id"], "output": "Done!"}
    again = [{"role": "user", "content": "hello"}, *done["output"][:1], result]
    assert create(server, input=again, **asked)["status"] == "completed"
    after = prompt_of(server, tokenizer)
    assert msgspec.json.encode(HUNK).decode() in after and "Done!" in after


@pytest.mark.parametrize("arguments", ['{"input": 1}', '{"text": "x"}', "[]", '"x"'])
def test_custom_tools_get_what_the_model_wrote(thinks: Thinks, arguments: str) -> None:
    (call,) = create(thinks(call_of("apply_patch", arguments)), tools=[PATCH])["output"]
    assert call["type"] == "message" or call["input"] == arguments


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_tools_that_may_be_called(thinks: Thinks, tokenizer: Tokenizer, mode: str) -> None:
    """One that the server leaves out is left out of a choice as well."""
    names = [{"type": "custom", "name": "apply_patch"}, {"type": "web_search"}]
    server = thinks(call_of("apply_patch", msgspec.json.encode({"input": "x"}).decode()))
    choice = {"type": "allowed_tools", "mode": mode, "tools": names}
    (call,) = create(server, tools=[PATCH, {"type": "web_search"}, NOW], tool_choice=choice)["output"]
    assert call["input"] == "x"
    (call,) = create(server, tools=[PATCH, NOW], tool_choice={"type": "custom", "name": "apply_patch"})["output"]
    assert call["input"] == "x" and server.engine.requests[-1].params.guide is not None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input", []),
        ("input", "hello " * (MAX_MODEL_LEN + 1)),
        ("input", "x" * (1 << 22)),
        ("input", [{"type": "computer_call"}]),
        ("input", [{"type": "item_reference"}]),
        ("input", [{"type": "item_reference", "id": 5}]),
        ("input", [{"id": "msg_lost"}]),
        ("input", [{"type": "unheard_of"}]),
        ("input", [{"type": "function_call_output", "call_id": "x", "output": "y"}]),
        ("background", True),
        ("conversation", "conv_1"),
        ("top_logprobs", 3),
        ("metadata", {str(i): "" for i in range(17)}),
        ("tools", [{"type": "none_such"}]),
        ("tools", [{"type": ["web_search"]}]),
        ("tools", [{"type": "custom"}]),
        ("tools", [{"type": "custom", "name": "x", "description": 1}]),
        ("tools", [{"type": "custom", "name": "x", "format": {"type": "grammar", "syntax": "ebnf", "definition": ""}}]),
        ("tools", [{"type": "custom", "name": "x", "format": {"type": "json"}}]),
        ("tool_choice", {"type": "web_search"}),
        ("tool_choice", {"type": "custom", "name": "none_such"}),
        ("input", [{"type": "custom_tool_call", "call_id": "x", "name": "y"}]),
        ("input", [{"type": "custom_tool_call_output", "call_id": "x", "output": "y"}]),
        ("tool_choice", {"type": "function", "name": "none_such"}),
        ("text", {"format": {"type": "xml"}}),
        ("reasoning", {"effort": "vast"}),
        ("max_output_tokens", 0),
        ("previous_response_id", "resp_lost"),
    ],
)
def test_refusals(thinks: Thinks, field: str, value: Any) -> None:
    response = thinks("x").http.post(PATH, json={"model": "tiny", "input": "hello", field: value})
    assert response.status_code in (400, 404), response.text
    assert response.json()["error"]["param"].startswith(field)


def test_instructions_and_a_system_item_are_one_message(thinks: Thinks) -> None:
    items = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "hello"}]
    wanted = create(thinks("x"), instructions="Be brief.", input=items[1:])["usage"]["input_tokens"]
    assert create(thinks("x"), instructions="Be brief.", input=items)["usage"]["input_tokens"] > wanted
    left_out = LeftOut("input")
    given = read_items([*items, {"role": "system", "content": "Later."}], left_out, {})
    history = read_history("Be brief.", given, left_out)
    assert [message["role"] for message in history] == ["system", "user", "system"]
    assert history[0]["content"] == "Be brief.\n\nBe kind."


def test_long_conversations_are_neither_kept_nor_continued(thinks: Thinks) -> None:
    server = thinks("x")
    long = "x" * (MAX_RESPONSE_BYTES + 1)
    body = {"model": "tiny", "input": "hello", "previous_response_id": "resp_lost"}
    response = server.http.post(PATH, json=body | {"instructions": long})
    assert response.status_code == 400 and "at most 4 MiB" in response.json()["error"]["message"]
    assert server.http.post(PATH, json=body | {"instructions": '"previous_response_id":'}).status_code == 404
    del body["previous_response_id"]
    mentions = server.http.post(PATH, json=body | {"instructions": long + '"previous_response_id":'})
    assert "previous_response_id" not in mentions.json()["error"]["message"], "only its text names the field"


def test_the_store_is_bounded() -> None:
    store, kept = ResponseStore(3, 100), Kept(b"x" * 10, b"y" * 10, b"z" * 10)
    for name in "abc":
        store.add("k", name, kept)
    store.get("k", "a")
    store.add("k", "d", kept)
    assert store.num_bytes == 90
    with pytest.raises(RequestError, match="there is no response"):
        store.get("k", "b")
    with pytest.raises(RequestError, match="there is no response"):
        store.get("other", "a")
    store.add("k", "e", Kept(b"x" * 80, b"", b""))
    assert store.num_bytes == 80
    store.add("k", "f", Kept(b"x" * 101, b"", b""))
    store.delete("k", "e")
    assert store.num_bytes == 0


def test_items_are_found_as_long_as_their_response_is_kept() -> None:
    store = ResponseStore(2, 2000)
    for name, item in (("a", b"1"), ("b", b"2")):
        store.add("k", name, Kept(b"", b"", b"", {"x": item, name: item}))
    assert [store.find_item("k", name) for name in "abx"] == [b"1", b"2", b"2"]
    assert store.find_item("other", "x") is None
    store.add("k", "c", Kept(b"", b"", b""))
    assert [store.find_item("k", name) for name in "abx"] == [None, b"2", b"2"]
    store.delete("k", "b")
    assert store.find_item("k", "x") is None and store.num_bytes == 0
    store.add("k", "d", Kept(b"", b"", b"", {str(i): b"" for i in range(8)}))
    assert store.find_item("k", "1") is None, "entries count"
    for name in ("a", "b"):
        store.add("k", name, Kept(b"", b"", b"", {"x": name.encode()}))
    assert store.find_item("k", "x") == b"b"
    store.delete("k", "b")
    assert store.find_item("k", "x") == b"a", "an earlier response has it still"


def test_stored_items_can_be_referred_to(thinks: Thinks, tokenizer: Tokenizer) -> None:
    """As Vercel's AI SDK does, with or without a type; also to items of the input."""
    server = thinks("<think>hm</think>I look." + call_of("now", "{}"))
    asked: dict[str, Any] = {"tools": [NOW], "reasoning": THINKS}
    first = create(server, **asked)["output"]
    result = {"type": "function_call_output", "call_id": first[-1]["call_id"], "output": "noon"}
    said = {"role": "user", "content": "hello"}
    create(server, input=[said, *first, result], **asked)
    whole = prompt_of(server, tokenizer)
    for kind in ({"type": "item_reference"}, {}, {"type": None}):
        references = [{**kind, "id": item["id"]} for item in first]
        second = create(server, input=[said, *references, result], **asked)
        assert prompt_of(server, tokenizer) == whole and "I look." in whole
    listed = server.http.get(f"{PATH}/{second['id']}/input_items?order=asc").json()["data"]
    assert [item["id"] for item in listed[1:-1]] == [item["id"] for item in first]
    create(server, input=[{"id": item["id"]} for item in listed], **asked)
    assert prompt_of(server, tokenizer) == whole
    for key in (r"\u0069d", r"i\u0064", r"\u0069\u0064"):
        raw = json.dumps({"input": [said, *references, result], **asked}).replace('"id"', f'"{key}"')
        answer = server.http.post(PATH, content=raw, headers={"Content-Type": "application/json"})
        assert answer.status_code == 200 and prompt_of(server, tokenizer) == whole
    raw = json.dumps({"input": "x", "previous_response_id": second["id"]}).replace("_id", r"\u005Fid")
    answer = server.http.post(PATH, content=raw, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200 and "I look." in prompt_of(server, tokenizer)
    long = [*references, {"role": "user", "content": "x" * 20_000}]  # read by the reader
    assert server.http.post(PATH, json={"input": long}).status_code == 200


def test_items_that_are_not_stored_are_named(thinks: Thinks) -> None:
    server = thinks("x")
    (unstored,) = create(server, store=False)["output"]
    said = {"role": "user", "content": "hello"}
    for item_id in (unstored["id"], "msg_none"):
        reference = {"type": "item_reference", "id": item_id}
        answer = server.http.post(PATH, json={"input": [said, reference]})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (404, "input[1].id", "item_not_found")
        assert item_id in error["message"]


def test_references_cannot_make_a_small_body_large(thinks: Thinks) -> None:
    server = thinks("x")
    made = create(server, input=[{"role": "user", "id": "msg_long", "content": "x" * 20_000}])
    assert made["status"] == "completed"
    answer = server.http.post(PATH, json={"input": [{"id": "msg_long"}] * 300})
    assert answer.status_code == 400 and "refers to items of more than 4 MiB" in answer.json()["error"]["message"]


def test_references_in_a_body_that_is_too_long(thinks: Thinks) -> None:
    server = thinks("x")
    made = create(server)["output"][0]["id"]
    long = {"role": "user", "content": "x" * MAX_RESPONSE_BYTES}
    answer = server.http.post(PATH, json={"input": [{"id": made}, long]})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "input[0].id") and "at most 4 MiB" in error["message"]


def test_more_references_than_items_are_allowed_are_not_looked_up(thinks: Thinks) -> None:
    server = thinks("x")
    create(server, input=[{"role": "user", "id": "msg_long", "content": "x" * 20_000}])
    answer = server.http.post(PATH, json={"input": [{"id": "msg_long"}] * (MAX_MESSAGES + 1)})
    assert answer.status_code == 400 and f"at most {MAX_MESSAGES}" in answer.json()["error"]["message"]


def test_only_responses_that_are_kept_have_items_of_their_own(thinks: Thinks) -> None:
    service = thinks("x").service
    for store in (True, False):
        raw = msgspec.json.encode({"input": "hello", "store": store})
        read = read_response(service.prompter, service.serving, with_earlier(bytearray(raw), b"", {}))
        assert read.repeated is not None and bool(read.repeated.own) is store


@pytest.mark.parametrize("streams", [False, True])
def test_a_disconnect_ends_the_work(thinks: Thinks, tokenizer: Tokenizer, streams: bool) -> None:
    server = thinks("")
    server.engine.script = lambda request: Script(tokenizer.encode("hello"), hang=True)
    connection = server.raw_post(PATH, {"model": "tiny", "input": "hello", "stream": streams})
    server.engine.wait_for(lambda: len(server.engine.requests) == 1)
    connection.close()
    server.engine.wait_for(lambda: len(server.engine.aborted) == 1)


def test_silent_streams_are_pinged_on_request(thinks: Thinks) -> None:
    server = thinks("")
    server.engine.script = lambda request: Script([], hang=True)
    body = {"model": "tiny", "input": "hello", "stream": True, "sse_ping_interval": 1}
    with server.raw_post(PATH, body) as connection:
        written = connection.makefile("rb")
        while written.readline() != b": ping\n":
            pass
        server.call(server.engine.finish_hanging)
        assert b"response.completed" in written.read()


def test_logprobs(thinks: Thinks) -> None:
    server = thinks("good day")
    asked: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 9}
    (whole,) = create(server, **asked)["output"][0]["content"]
    (streamed,) = stream(server, **asked)[-1]["response"]["output"][0]["content"]
    assert whole == streamed and "".join(token["token"] for token in whole["logprobs"]) == "good day"


def test_a_message_has_no_logprobs_of_the_call_before_it(thinks: Thinks) -> None:
    server = thinks(call_of("apply_patch", '{"input": "good"}') + "day")
    asked: dict[str, Any] = {"include": ["message.output_text.logprobs"], "tools": [PATCH]}
    call, message = create(server, **asked)["output"]
    assert (call["input"], message["content"][0]["text"]) == ("good", "day")
    assert "good" not in "".join(token["token"] for token in message["content"][0]["logprobs"])
