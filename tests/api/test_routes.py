"""Routes that other servers have: counts, HEAD, the tokenizer, Anthropic's list of models, SageMaker's path."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pypto_serving.api.text.tokenizer import Tokenizer
from tests.api.chat_events import prompt_of
from tests.api.checkpoint import CHATML
from tests.api.running import CHAT, RunningServer
from tests.api.scripted_engine import Script

HELLO = {"role": "user", "content": "hello"}


def test_input_tokens_are_counted(server: RunningServer) -> None:
    body = {"model": "tiny", "input": "hello", "instructions": "be brief"}
    stored = server.http.post("/v1/responses", json=body).json()
    counted = server.http.post("/v1/responses/input_tokens", json=body)
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": stored["usage"]["input_tokens"]}
    more = {"input": [{"id": stored["output"][0]["id"]}, HELLO], "previous_response_id": stored["id"]}
    count = server.http.post("/responses/input_tokens", json=more).json()["input_tokens"]
    assert count > stored["usage"]["input_tokens"]
    assert server.http.post("/v1/responses/input_tokens", json={"input": "hello " * 2000}).json()["input_tokens"] > 512
    assert server.http.post("/v1/responses/input_tokens", json={"input": []}).status_code == 400
    assert server.http.post("/v1/responses/input_tokens", json=body | {"model": "none"}).status_code == 404


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/models/tiny", "/version", "/metrics", "/api/tags"])
def test_head_is_get_without_a_body(server: RunningServer, path: str) -> None:
    head, whole = server.http.head(path), server.http.get(path)
    assert (head.status_code, head.content) == (whole.status_code, b"") == (200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]


def test_head_of_other_paths(server: RunningServer) -> None:
    assert [server.http.head(path).status_code for path in ("/v1/messages", "/none")] == [405, 404]


def test_what_is_said_of_the_tokenizer(server: RunningServer) -> None:
    told = server.http.get("/tokenizer_info").json()
    assert (told["eos_token"], told["chat_template"]) == ("<|end|>", CHATML)
    assert told["tokenizer_class"]


def test_models_in_the_form_of_anthropic(server: RunningServer) -> None:
    form = {"anthropic-version": "2023-06-01"}
    listed = server.http.get("/v1/models?limit=1000", headers=form).json()
    assert [(model["type"], model["id"]) for model in listed["data"]] == [("model", "tiny"), ("model", "tiny-alias")]
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("tiny", "tiny-alias", False)
    assert server.http.get("/v1/models/tiny", headers=form).json() == listed["data"][0]
    assert server.http.get("/v1/models").json()["object"] == "list"


def test_invocations_are_chats(server: RunningServer, tokenizer: Tokenizer) -> None:
    assert server.http.post("/invocations", json={"messages": [HELLO]}).json()["object"] == "chat.completion"
    assert "hello" in prompt_of(server, tokenizer)


def test_any_name_means_the_first_model(start: Callable[..., RunningServer]) -> None:
    server = start(any_model_name=True)
    for name, told in (("claude-x", "tiny"), ("tiny-alias", "tiny-alias"), (None, "tiny")):
        assert server.post(CHAT, {"model": name, "messages": [HELLO]}).json()["model"] == told
    assert server.http.get("/v1/models/gpt-5").json()["id"] == "tiny"
    assert server.http.post("/api/show", json={"model": "gpt-oss:20b"}).status_code == 200


def test_answers_after_reasoning_begin_with_words(chat_server: RunningServer, tokenizer: Tokenizer) -> None:
    template = CHATML + "{# <think></think> #}"
    for said in ("<think>\nhm\n</think>\n\nYes\n\nno", "<think></think>\r\n\nYes\n\nno"):
        chat_server.engine.script = lambda request, said=said: Script(tokenizer.encode(said), "stop")  # type: ignore[misc]
        body = {"messages": [HELLO], "chat_template": template}
        assert chat_server.post(CHAT, body).json()["choices"][0]["message"]["content"] == "Yes\n\nno"
        texts = [e["choices"][0]["delta"].get("content", "") for e in chat_server.events(CHAT, body)]
        assert "".join(texts) == "Yes\n\nno"
