"""POST /v1/messages and count_tokens: blocks, usage, stops, prompts and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pypto_serving.api.anthropic.answers import TokenCount
from pypto_serving.api.anthropic.messages import MessageFormat
from pypto_serving.api.chat.formats import Calls, OutputFormat
from pypto_serving.api.chat.parsers.scanner import Thinking
from pypto_serving.api.common.body import IgnoredFields, ReadBody, Shown
from pypto_serving.api.generation.choice import ChoiceOutput, Delta, TokenUsage
from pypto_serving.api.generation.request import FittedPrompt
from pypto_serving.api.http.errors import describe
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.errors import QueueFullError, UnavailableError
from pypto_serving.types.arrays import pack_ids, unpack_ids
from pypto_serving.types.request import RequestFault
from pypto_serving.types.sampling import SamplingParams
from tests.api.anthropic.talking import (
    CALL,
    CALL_NOW,
    COUNT,
    HELLO,
    NOW,
    PATH,
    SAID,
    THINKS,
    WEATHER,
    body,
    create,
    join,
    read_events,
    refusal,
    stream,
)
from tests.api.chat_events import prompt_of
from tests.api.documented import schema_of
from tests.api.running import RunningServer
from tests.api.scripted_engine import WAIT_S, Script

Thinks = Callable[..., RunningServer]


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """What does not differ from one answer to the next."""
    blocks = [{k: v for k, v in block.items() if k not in ("id", "signature")} for block in message["content"]]
    return {**message, "id": "", "content": blocks}


def test_blocks_follow_the_output(thinks: Thinks) -> None:
    server = thinks(SAID)
    message = create(server, tools=[WEATHER, NOW], thinking=THINKS)
    thought, text, weather, now = message["content"]
    assert (thought["thinking"].strip(), text["text"].strip()) == ("hm, hello", "I look.")
    assert (weather["name"], weather["input"]) == ("get_weather", {"city": "Paris é"})
    assert (now["name"], now["input"]) == ("now", {}) and now["id"] != weather["id"]
    assert (message["stop_reason"], message["stop_sequence"], message["role"]) == ("tool_use", None, "assistant")
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    for seed in range(4):
        server.engine.seed = seed
        streamed = join(stream(server, tools=[WEATHER, NOW], thinking=THINKS))
        assert without_ids(streamed) == without_ids(message)


@pytest.mark.parametrize(
    ("text", "finish", "fields", "reason"),
    [
        ("good day", "stop", {}, ("end_turn", None)),
        ("good day", "length", {}, ("max_tokens", None)),
        ("good day", "length", {"max_tokens": 40_000}, ("model_context_window_exceeded", None)),
        ("good day", "stop", {"stop_sequences": ["zz", " da"]}, ("stop_sequence", " da")),
        (CALL, "length", {"tools": [WEATHER]}, ("max_tokens", None)),
    ],
)
def test_why_an_answer_ended(
    thinks: Thinks, text: str, finish: str, fields: dict[str, Any], reason: tuple[str, str | None]
) -> None:
    server = thinks(text, finish)
    for message in (create(server, **fields), join(stream(server, **fields))):
        assert (message["stop_reason"], message["stop_sequence"]) == reason
        if reason[0] == "stop_sequence":
            assert message["content"] == [{"type": "text", "text": "good"}]


def test_an_answer_of_nothing_has_no_blocks(thinks: Thinks) -> None:
    server = thinks("")
    assert create(server)["content"] == join(stream(server))["content"] == []


def test_a_call_that_was_cut_keeps_its_text(thinks: Thinks) -> None:
    message = create(thinks(CALL[:-25], "length"), tools=[WEATHER])
    assert [block["type"] for block in message["content"]] == ["text"]
    message = create(thinks(CALL.partition("Paris")[0] + "x" * 2000), tools=[WEATHER], max_tokens=3000)
    (block,) = message["content"]
    assert message["stop_reason"] == "end_turn"
    assert list(block["input"]) == ["arguments"] and block["input"]["arguments"].startswith('{"city"')


def test_cached_tokens_are_no_input_tokens(thinks: Thinks) -> None:
    server = thinks("good day", cached=7)
    usage = create(server)["usage"]
    num_prompt = len(unpack_ids(server.engine.requests[-1].token_ids))
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (num_prompt - 7, 7)
    events = stream(server)
    start = events[0]["message"]["usage"]
    assert (start["input_tokens"], start["cache_read_input_tokens"]) == (num_prompt - 7, 7)
    assert events[-2]["usage"] == usage


CONVERSATIONS: list[dict[str, Any]] = [
    {},
    {"system": "be brief"},
    {"system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}], "tools": [WEATHER]},
    {"tools": [WEATHER, NOW], "tool_choice": {"type": "none"}},
    {"thinking": THINKS},
    {"messages": [HELLO, {"role": "assistant", "content": "The answer is"}]},
    {"messages": [HELLO, {"role": "assistant", "content": "hi"}, {"role": "system", "content": "now"}, HELLO]},
]


@pytest.mark.parametrize("fields", CONVERSATIONS)
def test_counts_are_those_of_the_answer(thinks: Thinks, fields: dict[str, Any]) -> None:
    server = thinks("good day", cached=3)
    usage = create(server, **fields)["usage"]
    asked = {key: value for key, value in body(**fields).items() if key != "max_tokens"}
    response = server.http.post(COUNT, json=asked)
    counted = msgspec.json.decode(response.content, type=TokenCount)
    assert counted.input_tokens == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert len(server.engine.requests) == 1, "to count computes nothing"


def test_a_count_may_be_larger_than_the_context(thinks: Thinks) -> None:
    server = thinks("x")
    long = [{"role": "user", "content": "hello world " * 20_000}]
    count = server.http.post(COUNT, json={"messages": long}).json()["input_tokens"]
    assert count > 1 << 15
    assert "prompt is too long" in refusal(server, messages=long)["message"]


def said(server: RunningServer, tokenizer: Tokenizer, **fields: Any) -> str:
    create(server, **fields)
    return prompt_of(server, tokenizer)


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


ASKS = "<|im_start|>assistant\n"
CLOSED = "<think>\n\n</think>\n\n"


def test_the_system_comes_first(thinks: Thinks, tokenizer: Tokenizer) -> None:
    server = thinks("x")
    end = turn("user", "hello") + ASKS + CLOSED
    assert said(server, tokenizer) == said(server, tokenizer, system="") == end
    assert said(server, tokenizer, system="brief") == turn("system", "brief") + end
    blocks = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=8a1f0;"},
        {"type": "text", "text": "brief", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        {"type": "text", "text": "kind"},
    ]
    assert said(server, tokenizer, system=blocks) == turn("system", "brief\nkind") + end
    assert said(server, tokenizer, system=blocks[:1]) == end


def test_calls_and_their_results(thinks: Thinks, tokenizer: Tokenizer) -> None:
    answer = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "?"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "a", "name": "get_weather", "input": {"city": "Rome"}},
        {"type": "tool_use", "id": "b", "name": "now", "input": {}},
    ]
    results = [
        {
            "type": "tool_result",
            "tool_use_id": "a",
            "content": [{"type": "text", "text": "sun"}, {"type": "text", "text": "22"}],
        },
        {"type": "tool_result", "tool_use_id": "b", "content": "no clock", "is_error": True},
        {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}},
    ]
    messages = [HELLO, {"role": "assistant", "content": answer}, {"role": "user", "content": results}]
    prompt = said(thinks("x"), tokenizer, messages=messages, thinking={"type": "adaptive"})
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    assert prompt == (
        turn("user", "hello")
        + turn("assistant", f"<think>hm</think>I look.{call}{CALL_NOW}")
        + turn("tool", "sun\n22")
        + turn("tool", "Error: no clock")
        + turn("user", "go on")
        + ASKS
    )
    empty = {"type": "tool_result", "tool_use_id": "a"}
    messages[2] = {"role": "user", "content": [empty]}
    assert turn("tool", "") in said(thinks("x"), tokenizer, messages=messages)


def test_turns_of_one_role_become_one(thinks: Thinks, tokenizer: Tokenizer) -> None:
    messages = [HELLO, HELLO, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}, HELLO]
    prompt = said(thinks("x"), tokenizer, messages=messages, thinking=THINKS)
    assert prompt == turn("user", "hello\nhello") + turn("assistant", "a\nb") + turn("user", "hello") + ASKS


def test_an_answer_that_was_begun_goes_on(thinks: Thinks, tokenizer: Tokenizer) -> None:
    server = thinks(" world")
    messages = [HELLO, {"role": "assistant", "content": [{"type": "text", "text": "hello"}]}]
    assert create(server, messages=messages)["content"] == [{"type": "text", "text": " world"}]
    assert prompt_of(server, tokenizer) == turn("user", "hello") + ASKS + "hello"


@pytest.mark.parametrize(
    ("thinking", "closed"),
    [
        (None, True),
        ({"type": "disabled"}, True),
        (THINKS, False),
        ({"type": "adaptive", "display": "summarized"}, False),
    ],
)
def test_thinking_is_a_switch(thinks: Thinks, tokenizer: Tokenizer, thinking: Any, closed: bool) -> None:
    prompt = said(thinks("x"), tokenizer, thinking=thinking)
    assert prompt.endswith(ASKS + CLOSED) == closed
    reasoning = thinks("x").engine.requests[-1].params.guide
    assert (reasoning is not None and reasoning.max_reasoning_tokens == 64) == (thinking == THINKS)


def test_thinking_may_be_left_out(thinks: Thinks) -> None:
    thinking = {"type": "enabled", "budget_tokens": 64, "display": "omitted"}
    server = thinks("<think>\nhm\n</think>\n\nI look.")
    for message in (create(server, thinking=thinking), join(stream(server, thinking=thinking))):
        assert message["content"] == [{"type": "text", "text": "I look."}]
        assert message["usage"]["output_tokens_details"]["thinking_tokens"] > 0


def test_parameters_reach_the_engine(thinks: Thinks) -> None:
    server = thinks("x")
    create(server, temperature=0.25, top_p=0.5, top_k=7, stop_sequences=["a", "b"], max_tokens=9)
    params = server.engine.requests[-1].params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.25, 0.5, 7, 9)
    create(server)
    assert server.engine.requests[-1].params.temperature == 0.6, "the model's own"


def test_what_changes_nothing_is_accepted(thinks: Thinks) -> None:
    accepted = {
        "metadata": {"user_id": "u"},
        "cache_control": {"type": "ephemeral"},
        "service_tier": "auto",
        "container": None,
        "mcp_servers": [],
        "speed": "fast",
    }
    response = thinks("x").http.post(f"{PATH}?beta=true", json=body(**accepted, context_management={}))
    assert (response.status_code, response.headers["x-ignored-fields"]) == (200, "context_management")


@pytest.mark.parametrize(
    ("choice", "forced", "single"),
    [
        ({"type": "auto"}, False, False),
        ({"type": "auto", "disable_parallel_tool_use": True}, False, True),
        ({"type": "any"}, True, False),
        ({"type": "any", "disable_parallel_tool_use": True}, True, True),
        ({"type": "tool", "name": "now"}, True, True),
    ],
)
def test_choices_of_tools(thinks: Thinks, choice: dict[str, Any], forced: bool, single: bool) -> None:
    server = thinks(f"{CALL_NOW}\n{CALL}")
    message = create(server, tools=[WEATHER, NOW], tool_choice=choice)
    assert [block["name"] for block in message["content"]] == (["now"] if single else ["now", "get_weather"])
    assert (server.engine.requests[-1].params.guide is not None) == forced


def test_no_tools_are_shown_that_must_not_be_called(thinks: Thinks, tokenizer: Tokenizer) -> None:
    server = thinks(CALL)
    message = create(server, tools=[WEATHER], tool_choice={"type": "none"})
    assert "get_weather" not in prompt_of(server, tokenizer)
    assert [block["type"] for block in message["content"]] == ["text"]


def test_answers_follow_a_schema(thinks: Thinks) -> None:
    server = thinks("{}")
    create(
        server, output_config={"effort": "low", "format": {"type": "json_schema", "schema": WEATHER["input_schema"]}}
    )
    assert server.engine.requests[-1].params.guide is not None


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
CALLED = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "now", "input": {}}]}


def result(**fields: Any) -> list[dict[str, Any]]:
    block = {"type": "tool_result", "tool_use_id": "a", **fields}
    return [HELLO, CALLED, {"role": "user", "content": [block]}]


def deep(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"a": value}
    return value


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens is -1"),
    ({"max_tokens": "9"}, "max_tokens"),
    ({"messages": []}, "messages have nothing"),
    ({"messages": [{"role": "user", "content": []}]}, "nothing to answer"),
    ({"messages": [{"role": "system", "content": "now"}]}, "nothing to answer"),
    ({"messages": {}}, "messages"),
    ({"messages": [HELLO] * 16_385}, "at most 16384"),
    ({"messages": ["hello"]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role is 'tool'"),
    ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content is 5"),
    ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content[0] is 'hi'"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text is missing"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "is a block of type 'image'"),
    ({"messages": [{"role": "system", "content": [IMAGE]}, HELLO]}, "is a block of type 'image'"),
    ({"messages": result(is_error="yes")}, "is_error is 'yes'"),
    ({"messages": result(tool_use_id="b")}, "no earlier tool_use has this id"),
    ({"messages": [HELLO, CALLED]}, "end with the assistant"),
    ({"messages": [HELLO, {"role": "assistant", "content": ""}]}, "end with the assistant"),
    ({"messages": [{"role": "assistant", "content": [{**CALLED["content"][0], "input": 1}]}]}, "input is 1"),  # type: ignore[index]
    ({"messages": [{"role": "assistant", "content": [{**CALLED["content"][0], "input": deep(70)}]}]}, "64 levels"),  # type: ignore[index]
    ({"system": 5}, "system is 5"),
    ({"system": [IMAGE]}, "system[0] is a block of type 'image'"),
    ({"tools": {}}, "tools is {}"),
    ({"tools": [NOW] * 1025}, "at most 1024"),
    ({"tools": [NOW, NOW]}, "tools[1].name is 'now' like tools[0].name"),
    ({"tools": [{"name": "now"}]}, "tools[0].input_schema is None"),
    ({"tools": [{**NOW, "name": "no w"}]}, "tools[0].name is 'no w'"),
    ({"tools": [{**NOW, "name": None}]}, "tools[0].name is None"),
    ({"tools": [{**NOW, "description": 5}]}, "tools[0].description is 5"),
    ({"tools": [{**NOW, "strict": "yes"}]}, "tools[0].strict is 'yes'"),
    ({"tools": [{**NOW, "input_schema": deep(70)}]}, "64 levels"),
    ({"tools": [{"type": 5, "name": "web_search"}]}, "tools[0].type is 5"),
    ({"tool_choice": "auto"}, "tool_choice is 'auto'"),
    ({"tool_choice": {"type": "any"}}, "there are no tools"),
    ({"tools": [NOW], "tool_choice": {"type": "tool", "name": "then"}}, "the names in tools are ['now']"),
    ({"tools": [NOW], "tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, "is 1, but must be true"),
    ({"stop_sequences": "a"}, "stop_sequences"),
    ({"stop_sequences": ["a"] * 17}, "at most 16"),
    ({"stop_sequences": [""]}, "stop_sequences is '', but must be"),
    ({"stop_sequences": ["a" * 1025]}, "stop_sequences is 1025 characters long"),
    ({"thinking": True}, "thinking is True"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "budget_tokens is 0"),
    ({"thinking": {"type": "enabled", "budget_tokens": 400}}, "must be less than max_tokens"),
    ({"thinking": {"type": "adaptive", "display": 5}}, "display is 5"),
    ({"output_config": 5}, "output_config is 5"),
    ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format"),
    ({"output_config": {"effort": "much"}}, "output_config.effort is 'much'"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"thread": {"type": "create"}}, "keeps no conversations"),
]


@pytest.mark.parametrize(("fields", "words"), BAD, ids=[words for _, words in BAD])
def test_refusals_name_the_place(thinks: Thinks, fields: dict[str, Any], words: str) -> None:
    server = thinks("x")
    error = refusal(server, **fields)
    assert error["type"] == "invalid_request_error" and words in error["message"], error
    assert server.engine.requests == []


DEPENDS = [
    *("nothing to answer", "no earlier tool_use", "end with the assistant", "64 levels", "like tools[0].name"),
    *("there are no tools", "the names in tools are", "less than max_tokens"),
]
"""Words of refusals that depend on other fields, or on depth."""


def test_bodies_are_as_described(thinks: Thinks) -> None:
    document = thinks("x").http.get("/openapi.json").json()
    validator = schema_of(document, "MessagesBody")
    for fields in CONVERSATIONS:
        validator.validate(body(**fields))
    for fields, words in BAD:
        assert validator.is_valid(body(**fields)) == any(w in words for w in DEPENDS), (fields, words)


def test_every_status_has_anthropics_type(thinks: Thinks) -> None:
    server = thinks("x")
    assert refusal(server, 404, model="claude")["type"] == "not_found_error"
    assert refusal(server, 404, "/v1/messages/batches")["type"] == "not_found_error"
    try:
        server.engine.refusal = QueueFullError("full", 3)
        assert refusal(server, 429)["type"] == "rate_limit_error"
        server.engine.refusal = UnavailableError("loading")
        assert refusal(server, 503)["type"] == "overloaded_error"
        server.engine.refusal = RuntimeError("a bug")
        assert refusal(server, 500)["type"] == "api_error"
    finally:
        server.engine.refusal = None
    server.engine.script = lambda request: Script([], fault=RequestFault(500, "not_finite", "no numbers"))
    assert refusal(server, 500)["type"] == "api_error"
    events = read_events(server.http.post(PATH, json=body(stream=True)).text)
    assert [(event["type"], event["error"]["type"]) for event in events] == [("error", "api_error")]
    server.engine.script = lambda request: Script([], fault=RequestFault(504, "deadline_exceeded", "too late"))
    assert refusal(server, 504)["type"] == "timeout_error"


def test_a_body_that_is_too_large(start: Callable[..., RunningServer]) -> None:
    server = start(max_body_bytes=2000)
    assert refusal(server, 413, system="a" * 3000)["type"] == "request_too_large"


def test_the_key_may_come_as_x_api_key(start: Callable[..., RunningServer]) -> None:
    server = start(api_keys=("secret",))
    assert refusal(server, 401)["type"] == "authentication_error"
    for name, value, status in (
        ("x-api-key", "secret", 200),
        ("authorization", "Bearer secret", 200),
        ("x-api-key", "other", 401),
    ):
        headers = {name: value, "anthropic-version": "2023-06-01"}
        assert server.http.post(PATH, json=body(), headers=headers).status_code == status


@pytest.mark.parametrize("streams", [False, True])
def test_a_disconnect_ends_the_work(thinks: Thinks, tokenizer: Tokenizer, streams: bool) -> None:
    server = thinks("")
    server.engine.script = lambda request: Script(tokenizer.encode("hello"), hang=True)
    connection = server.raw_post(PATH, body(stream=streams))
    server.engine.wait_for(lambda: len(server.engine.requests) == 1)
    connection.close()
    server.engine.wait_for(lambda: len(server.engine.aborted) == 1)


def test_silence_is_filled_with_pings(thinks: Thinks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ping comes after message_start, whatever the model does; then the usage is that of the whole prompt."""
    monkeypatch.setattr("pypto_serving.api.anthropic.messages_body.PING_S", 0.05)
    server = thinks("")
    server.engine.script = lambda request: Script([], hang=True)
    with server.http.stream("POST", PATH, json=body(stream=True), timeout=WAIT_S) as response:
        text = ""
        for piece in response.iter_text():
            text += piece
            if text.count("event: ping") == 2:
                server.call(server.engine.submissions[-1].finish)
    assert text.startswith("event: message_start\n") and '"ping"' in text.split("\n\n")[1]
    assert join(read_events(text))["stop_reason"] == "end_turn"


PIECES = st.lists(
    st.sampled_from(["<think>", "</think>", "\n", "hi ", "é\u2028", CALL, CALL_NOW, "<tool_call>", "{", '"a"']),
    max_size=8,
)
FORMS = [
    None,
    OutputFormat(Thinking("<think>", "</think>")),
    OutputFormat(Thinking("<think>", "</think>", True), Calls("hermes", {})),
    OutputFormat(None, Calls("hermes", {}, one=True)),
]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(pieces=PIECES, form=st.sampled_from(FORMS), size=st.integers(1, 9))
def test_any_output_makes_events_in_order(pieces: list[str], form: OutputFormat | None, size: int) -> None:
    """And however it is cut, they make the whole message."""
    text, usage = "".join(pieces), TokenUsage(9, 5, 4, (4, 0, 0, 0))
    deltas = [Delta(0, text[i : i + size], None, None) for i in range(0, len(text), size)]
    deltas.append(Delta(0, "", None, "stop"))
    output = ChoiceOutput(0)
    for delta in deltas:
        output.add(delta)
    prompt, params = FittedPrompt(pack_ids([1] * 9), 16), SamplingParams(max_tokens=16)
    ignored, shown = IgnoredFields([], 0), Shown()
    body = ReadBody(model="tiny", ignored=ignored, shown=shown, prompts=[prompt], params=params, new_parser=form)
    wanted = body.generation("msg_1")
    written_whole = MessageFormat(body, wanted, "r").response([output], usage)
    whole = msgspec.to_builtins(written_whole)
    streamed = MessageFormat(body, wanted, "r")
    written = streamed.opening(usage) + b"".join(map(streamed.writer, deltas)) + streamed.closing(usage)
    assert len(written.splitlines()) == written.count(b"\n"), "each event has its lines and no others"
    assert without_ids(join(read_events(written.decode()))) == without_ids(whole)
    failure = MessageFormat(body, wanted, "r").failure(describe(UnavailableError("down")))
    assert failure.endswith(b"\n\n") and failure.count(b"\n") == 3
