"""DeepSeek V4 over real HTTP: prompts as the engine gets them, reasoning and tool calls as clients do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pypto_serving.api.settings import load_serving_config
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.types.arrays import unpack_ids
from tests.api.chat_events import PATH, calls_of, join_events, prompt_of
from tests.api.checkpoint import write_deepseek_v4
from tests.api.conftest import new_engine
from tests.api.running import RunningServer
from tests.api.scripted_engine import Script

HELLO = {"role": "user", "content": "hello"}
B, U, A = "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALLS = (
    "\n\n<｜DSML｜tool_calls>\n"
    '<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">中 "b"</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="now">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
)
EXPECTED = [("get_weather", {"city": '中 "b"', "days": 3}), ("now", {})]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_deepseek_v4(tmp_path_factory.mktemp("deepseek_v4"))


@pytest.fixture(scope="module")
def v4_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def v4_server(folder: Path, v4_tokenizer: Tokenizer) -> Iterator[RunningServer]:
    serving = load_serving_config(folder, architecture="DeepseekV4ForCausalLM", served_model_names=("v4",))
    server = RunningServer(new_engine(v4_tokenizer, max_model_len=8192), serving)
    yield server
    server.stop()


@pytest.fixture
def says(v4_server: RunningServer, v4_tokenizer: Tokenizer) -> Callable[[str], RunningServer]:
    """A server whose model says `text` and stops."""

    def say(text: str, finish: str = "stop") -> RunningServer:
        v4_server.engine.script = lambda request: Script(v4_tokenizer.encode(text), finish)
        return v4_server

    return say


def streamed(server: RunningServer, body: dict[str, Any], index: int = 0) -> dict[str, Any]:
    return join_events(server.events(PATH, body), index)


def test_the_prompt_is_the_familys_own(says: Callable[..., RunningServer], v4_tokenizer: Tokenizer) -> None:
    server = says("x")
    server.post(PATH, {"messages": [{"role": "system", "content": "S"}, HELLO]})
    ids = unpack_ids(server.engine.requests[-1].token_ids).tolist()
    names = (B, U, A, "<think>")
    assert [i for i in ids if i in {v4_tokenizer.raw.token_to_id(name) for name in names}] == [
        v4_tokenizer.raw.token_to_id(name) for name in names
    ]
    assert prompt_of(server, v4_tokenizer) == f"{B}S{U}hello{A}<think>"


OPTIONS = [
    ({}, "<think>"),
    ({"reasoning_effort": "none"}, "</think>"),
    ({"reasoning_effort": "low"}, "<think>"),
    ({"thinking": {"type": "disabled"}}, "</think>"),
    ({"chat_template_kwargs": {"thinking": False}}, "</think>"),
    ({"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}, "<think>"),
    ({"chat_template_kwargs": {"enable_thinking": None}}, "<think>"),
    ({"tools": [], "response_format": {"type": "text"}, "tool_choice": "auto"}, "<think>"),
    ({"tools": [WEATHER], "tool_choice": "none"}, "<think>"),
]


@pytest.mark.parametrize(("options", "mark"), OPTIONS)
def test_options(
    says: Callable[..., RunningServer], v4_tokenizer: Tokenizer, options: dict[str, Any], mark: str
) -> None:
    server = says("x")
    response = server.post(PATH, {"messages": [HELLO], **options})
    assert response.status_code == 200, response.text
    assert "x-ignored-fields" not in response.headers
    assert prompt_of(server, v4_tokenizer) == f"{B}{U}hello{A}{mark}"


def test_tools_and_format_reach_the_prompt(says: Callable[..., RunningServer], v4_tokenizer: Tokenizer) -> None:
    server = says("x")
    format_ = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    server.post(PATH, {"messages": [HELLO], "tools": [WEATHER], "response_format": format_, "reasoning_effort": "max"})
    prompt = prompt_of(server, v4_tokenizer)
    assert prompt.startswith(f"{B}Reasoning Effort: Absolute maximum")
    assert '\n{"name": "get_weather", "parameters": {"type": "object"}}\n' in prompt
    assert prompt.endswith(f'to reply:\n{{"type": "object"}}{U}hello{A}<think>')


@pytest.mark.parametrize("seed", range(8))
def test_reasoning_and_calls_in_any_portions(says: Callable[..., RunningServer], seed: int) -> None:
    server = says(f"Because 中.</think>I look.{CALLS}")
    server.engine.seed = seed
    body = {"messages": [HELLO], "tools": [WEATHER], "n": 2}
    whole = server.post(PATH, body).json()["choices"]
    server.engine.seed = seed + 1000
    for choice in whole:
        message = choice["message"]
        assert message["reasoning_content"] == message["reasoning"] == "Because 中."
        assert (message["content"], choice["finish_reason"]) == ("I look.", "tool_calls")
        assert calls_of(message["tool_calls"]) == EXPECTED
        parts = streamed(server, body, choice["index"])
        assert (parts["role"], parts["content"], parts["finish_reason"]) == ("assistant", "I look.", "tool_calls")
        assert parts["reasoning_content"] == parts["reasoning"] == "Because 中."
        assert [call["index"] for call in parts["calls"]] == [0, 1]
        assert calls_of(parts["calls"]) == EXPECTED


def test_the_end_mark_is_not_content(v4_server: RunningServer, v4_tokenizer: Tokenizer) -> None:
    eos = v4_tokenizer.eos_token_id
    assert eos is not None
    tokens = [*v4_tokenizer.encode("Hm.</think>yes"), eos]
    v4_server.engine.script = lambda request: Script(tokens, "stop", stop_token_id=eos)
    message = v4_server.post(PATH, {"messages": [HELLO]}).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "yes")
    assert eos in v4_server.engine.requests[-1].eos_token_ids


def test_only_calls_have_null_content(says: Callable[..., RunningServer]) -> None:
    message = says(f"Hm.</think>{CALLS}").post(PATH, {"messages": [HELLO], "tools": [WEATHER]}).json()["choices"][0]
    assert message["message"]["content"] is None


def test_without_tools_calls_are_content(says: Callable[..., RunningServer]) -> None:
    server = says(f"Hm.</think>a{CALLS}")
    choice = server.post(PATH, {"messages": [HELLO]}).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (f"a{CALLS}", "stop")
    assert "tool_calls" not in choice["message"]


def test_chat_mode_has_no_reasoning(says: Callable[..., RunningServer]) -> None:
    server, body = says("plain"), {"messages": [HELLO], "reasoning_effort": "none"}
    message = server.post(PATH, body).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "plain", "refusal": None}
    assert streamed(server, body)["content"] == "plain"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_within_its_reasoning(says: Callable[..., RunningServer], stream: bool) -> None:
    server, body = says("never ends </thi", "length"), {"messages": [HELLO]}
    if stream:
        message = streamed(server, body)
        reason = message["finish_reason"]
    else:
        choice = server.post(PATH, body).json()["choices"][0]
        message, reason = choice["message"], choice["finish_reason"]
    assert (message["content"], message["reasoning"], reason) == ("", "never ends </thi", "length")


def test_logprobs_cover_every_token(says: Callable[..., RunningServer], v4_tokenizer: Tokenizer) -> None:
    text = f"Hm.</think>a{CALLS}"
    server, body = says(text), {"messages": [HELLO], "tools": [WEATHER], "logprobs": True}
    whole = server.post(PATH, body).json()["choices"][0]["logprobs"]["content"]
    events = server.events(PATH, body)
    scored = [event["choices"][0]["logprobs"] for event in events]
    assert [entry for logprobs in scored if logprobs for entry in logprobs["content"]] == whole
    assert b"".join(bytes(entry["bytes"]) for entry in whole).decode() == text
    assert len(whole) == len(v4_tokenizer.encode(text))


def test_the_official_client_runs_a_tool(says: Callable[..., RunningServer], v4_tokenizer: Tokenizer) -> None:
    server = says(f"Hm.</think>{CALLS}")
    client = server.openai()
    messages: list[Any] = [HELLO]
    first = client.chat.completions.create(model="v4", messages=messages, tools=[WEATHER])  # type: ignore[list-item]
    answer = first.choices[0].message
    assert answer.tool_calls is not None
    messages.append(answer)
    for call in reversed(answer.tool_calls):
        messages.append({"role": "tool", "tool_call_id": call.id, "content": call.function.name})  # type: ignore[union-attr]
    client.chat.completions.create(model="v4", messages=messages, tools=[WEATHER])  # type: ignore[list-item]
    results = "<tool_result>get_weather</tool_result>\n\n<tool_result>now</tool_result>"
    history = f"{U}hello{A}<think>Hm.</think>{CALLS}<｜end▁of▁sentence｜>{U}{results}{A}<think>"
    assert prompt_of(server, v4_tokenizer).endswith(history)


BAD = [
    ({"messages": [HELLO, {"role": "critic", "content": "x"}]}, "messages[1].role", "'critic'"),
    ({"messages": [HELLO, {"role": "assistant", "content": "x"}]}, "messages[1]", "`prefix`"),
    ({"messages": [HELLO], "reasoning_effort": "huge"}, "reasoning_effort", "none, minimal, low, medium, high"),
    ({"messages": [HELLO], "tools": [{"type": "function"}]}, "tools[0]", "'function'"),
    (
        {"messages": [HELLO], "tools": [WEATHER], "tool_choice": 5},
        "tool_choice",
        "tool_choice is 5, but must be one of 'none'",
    ),
    ({"messages": [HELLO], "documents": [{}]}, "documents", "not supported by DeepSeek V4"),
    ({"messages": [HELLO], "tools": "x"}, "tools", "'x'"),
    (
        {"messages": [HELLO], "tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]},
        "tools[0].function.parameters",
        "is 'x', but must be a JSON schema",
    ),
    ({"messages": [HELLO, {"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[1].tool_call_id", "'1'"),
    ({"messages": [HELLO], "response_format": {"type": "json_schema"}}, "response_format", "a JSON schema"),
    ({"messages": [HELLO], "chat_template_kwargs": {"enable": 1}}, "chat_template_kwargs", "enable_thinking"),
    ({"messages": [HELLO], "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "must not set tools"),
    (
        {"messages": [HELLO], "reasoning_effort": "max", "chat_template_kwargs": {"reasoning_effort": "low"}},
        "reasoning_effort",
        "send one",
    ),
]


@pytest.mark.parametrize(("body", "param", "words"), BAD, ids=[f"{param}-{i}" for i, (_, param, _) in enumerate(BAD)])
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_served_is_named(
    says: Callable[..., RunningServer], body: dict[str, Any], param: str, words: str, stream: bool
) -> None:
    response = says("x").post(PATH, {**body, "stream": stream})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert words in error["message"]


def test_tokenize_uses_the_encoding(says: Callable[[str], RunningServer]) -> None:
    server = says("hi")
    chat = {"messages": [HELLO], "thinking": {"type": "disabled"}}
    assert server.post(PATH, chat).status_code == 200
    found = server.http.post("/tokenize", json={**chat, "return_token_strs": True})
    assert "x-ignored-fields" not in found.headers
    assert found.json()["tokens"] == unpack_ids(server.engine.requests[-1].token_ids).tolist()
    assert "<｜User｜>" in server.http.post("/detokenize", json={"tokens": found.json()["tokens"]}).json()["prompt"]
