"""Ollama's API: what its clients send, and the lines that they read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pypto_serving.api.text.tokenizer import Tokenizer
from tests.api.anthropic.talking import TEMPLATE
from tests.api.chat_events import prompt_of
from tests.api.checkpoint import write_checkpoint
from tests.api.running import RunningServer
from tests.api.scripted_engine import Script
from tests.api.tool_samples import NOW_TOOL

HELLO = {"role": "user", "content": "hello"}
SAID = '<think>\nhm\n</think>\n\nI look.<tool_call>\n{"name": "now", "arguments": {"zone": "é"}}\n</tool_call>'
Json = dict[str, Any]


@pytest.fixture
def server(
    start: Callable[..., RunningServer], tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer
) -> RunningServer:
    folder = write_checkpoint(tmp_path_factory.mktemp("ollama"), template=TEMPLATE)
    server = start(folder, config={"max_model_len": 4096})
    server.engine.script = lambda request: Script(tokenizer.encode(SAID), "stop")
    return server


def ask(server: RunningServer, path: str, **fields: Any) -> Any:
    answer = server.http.post(path, json={"model": "tiny", **fields})
    assert answer.status_code == 200, answer.text
    return answer


def lines(server: RunningServer, path: str, **fields: Any) -> list[Json]:
    answer = ask(server, path, **fields)
    assert answer.headers["content-type"] == "application/x-ndjson"
    *found, rest = answer.text.split("\n")
    assert rest == ""
    return [json.loads(line) for line in found]


def test_the_models_are_listed_and_described(server: RunningServer) -> None:
    assert server.http.get("/api/version").json()["version"] >= "0.13.4"
    for path in ("/api/tags", "/api/ps"):
        listed = server.http.get(path).json()["models"]
        assert [model["name"] for model in listed] == [model["model"] for model in listed] == ["tiny", "tiny-alias"]
        assert len({model["digest"] for model in listed}) == 2
    shown = ask(server, "/api/show").json()
    family = shown["details"]["family"]
    assert shown["model_info"][f"{family}.context_length"] == 4096 and shown["capabilities"] == [
        "completion",
        "tools",
        "thinking",
    ]
    assert ask(server, "/api/show", model=None, name="tiny:latest").json() == shown
    assert ask(server, "/api/pull").text == '{"status":"success"}\n'
    for path in ("/api/show", "/api/pull", "/api/chat", "/api/generate"):
        answer = server.http.post(path, json={"model": "none", "messages": [HELLO], "prompt": "x"})
        assert answer.status_code == 404 and "none" in answer.json()["error"]


def test_a_model_without_tools_and_reasoning_is_shown_so(start: Callable[..., RunningServer], tmp_path: Path) -> None:
    assert ask(start(write_checkpoint(tmp_path)), "/api/show").json()["capabilities"] == ["completion"]


def test_a_chat_streams_unless_told_otherwise(server: RunningServer, tokenizer: Tokenizer) -> None:
    asked: Json = {"messages": [{"role": "system", "content": "be brief"}, HELLO], "tools": [NOW_TOOL], "think": True}
    *said, last = lines(server, "/api/chat", **asked)
    assert "be brief" in prompt_of(server, tokenizer) and not any(line["done"] for line in said)
    messages = [line["message"] for line in said]
    assert "".join(message.get("thinking", "") for message in messages) == "\nhm\n"
    assert "".join(message["content"] for message in messages) == "I look."
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    assert calls == [{"function": {"name": "now", "arguments": {"zone": "é"}}}]
    assert (last["done"], last["done_reason"], last["message"]) == (True, "stop", {"role": "assistant", "content": ""})
    assert last["prompt_eval_count"] > 10 and last["eval_count"] == len(tokenizer.encode(SAID))
    whole = ask(server, "/api/chat", stream=False, **asked).json()
    assert whole["message"] == {"role": "assistant", "content": "I look.", "thinking": "\nhm\n", "tool_calls": calls}
    assert whole.keys() == last.keys()


def test_a_history_with_calls_that_have_no_ids(server: RunningServer, tokenizer: Tokenizer) -> None:
    calls = [{"function": {"name": name, "arguments": {"zone": name}}} for name in ("now", "then")]
    told = {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": calls}
    results = [{"role": "tool", "content": f"result {name}", "tool_name": name} for name in ("then", "now")]
    ask(server, "/api/chat", messages=[HELLO, told, *results], tools=[NOW_TOOL])
    prompt = prompt_of(server, tokenizer)
    assert prompt.index("<think>hm</think>") < prompt.index('"zone": "then"') < prompt.index("tool\nresult then")


def test_options_and_formats(server: RunningServer) -> None:
    options = {"temperature": 0, "num_predict": 7, "top_k": 5, "stop": ["x"], "repeat_penalty": 2, "num_ctx": 4096}
    answer = ask(server, "/api/chat", messages=[HELLO], options=options | {"mirostat": 1}, keep_alive="5m", odd=1)
    assert answer.headers["x-ignored-fields"] == "odd, options.mirostat"
    params = server.engine.requests[-1].params
    assert (params.temperature, params.max_tokens, params.top_k, params.repetition_penalty) == (0, 7, 5, 2)
    ask(server, "/api/chat", messages=[HELLO], options={"num_predict": -1})
    assert server.engine.requests[-1].params.max_tokens is None or server.engine.requests[-1].params.max_tokens > 3000
    for wanted in ("json", {"type": "object", "properties": {"a": {"type": "string"}}}):
        ask(server, "/api/chat", messages=[HELLO], format=wanted)
        assert server.engine.requests[-1].params.guide is not None
    huge = 10**400
    for bad in (
        {"format": "xml"},
        {"think": "hard"},
        {"messages": [1]},
        {"options": {"temperature": -1}},
        {"options": {"temperature": huge}},
        {"options": {"min_p": -huge}},
        {"options": {"seed": huge}},
        {"options": {"num_predict": huge}},
    ):
        answer = server.http.post("/api/chat", json={"messages": [HELLO], **bad})
        assert answer.status_code == 400 and isinstance(answer.json()["error"], str)


def test_a_prompt_is_continued(server: RunningServer, tokenizer: Tokenizer) -> None:
    *said, last = lines(server, "/api/generate", prompt="hello", system="be brief", think=True)
    assert "be brief" in prompt_of(server, tokenizer)
    assert "".join(line["response"] for line in said).startswith("I look.")
    assert (last["done"], last["response"]) == (True, "")
    whole = ask(server, "/api/generate", prompt="hello", raw=True, stream=False).json()
    assert prompt_of(server, tokenizer) == "hello" and whole["response"] == SAID
    unused = ask(server, "/api/generate", prompt="hello", raw=True, stream=False, system="be brief", think=True, odd=1)
    assert unused.headers["x-ignored-fields"] == "odd, system, think" and prompt_of(server, tokenizer) == "hello"


def test_calls_with_large_integers(server: RunningServer, tokenizer: Tokenizer) -> None:
    call = {"function": {"name": "now", "arguments": {"zone": 10**400}}}
    ask(server, "/api/chat", messages=[HELLO, {"role": "assistant", "tool_calls": [call]}, HELLO])
    assert "1" + "0" * 400 in prompt_of(server, tokenizer)


def test_bodies_need_not_be_declared(server: RunningServer) -> None:
    """As curl sends them. Forms of web pages come with their origin."""
    body = json.dumps({"model": "tiny", "messages": [HELLO], "prompt": "hello", "stream": False}).encode()
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    for path in ("/api/chat", "/api/generate", "/api/show", "/api/pull"):
        assert server.http.post(path, content=body, headers=form).status_code == 200
    own = {"Origin": "http://127.0.0.1", "Host": "127.0.0.1"}
    answer = server.http.post("/api/chat", content=body, headers=form | own)
    assert answer.status_code == 415


def test_a_body_without_words_loads_the_model(server: RunningServer) -> None:
    for path, fields in (("/api/generate", {}), ("/api/chat", {"messages": []}), ("/api/generate", {"prompt": ""})):
        answer = ask(server, path, keep_alive=0, **fields).json()
        assert (answer["done"], answer["done_reason"]) == (True, "load")
        assert server.http.post(path, json={"model": "none", **fields}).status_code == 404
    assert not server.engine.requests


def test_images_are_refused(server: RunningServer) -> None:
    asked = {"messages": [{**HELLO, "images": ["AAAA"]}]}
    assert "image_url" in server.http.post("/api/chat", json=asked).json()["error"]
    for raw in (False, True):
        asked = {"prompt": "x", "images": ["AAAA"], "raw": raw}
        assert server.http.post("/api/generate", json=asked).status_code == 400


def test_images_of_earlier_messages_become_one_text(server: RunningServer, tokenizer: Tokenizer) -> None:
    told = {"role": "assistant", "content": "yes"}
    ask(server, "/api/chat", messages=[{**HELLO, "images": ["AAAA", "BBBB"]}, told, HELLO])
    assert prompt_of(server, tokenizer).count("image left out") == 1
    asked = {"messages": [{**HELLO, "images": "AAAA"}, told, HELLO]}
    answer = server.http.post("/api/chat", json=asked)
    assert answer.status_code == 400 and "messages[0].images" in answer.json()["error"]
