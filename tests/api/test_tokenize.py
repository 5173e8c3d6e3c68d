"""POST /tokenize and /detokenize, and /render of completions and chats, from the client's side."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pypto_serving.api.common import body as bodies
from pypto_serving.api.common.described import Error
from pypto_serving.api.openai import tokenize
from pypto_serving.api.openai.answers import Detokenized, RenderedRequest, Tokenized
from pypto_serving.api.text.tokenizer import Tokenizer
from tests.api.bad_bodies import HELLO
from tests.api.checkpoint import TEXT, write_checkpoint
from tests.api.documented import schema_of
from tests.api.running import CHAT, COMPLETIONS, RunningServer, is_served_until
from tests.api.scripted_engine import WAIT_S
from tests.api.templates import HERMES

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def ask(server: RunningServer, path: str, kind: Any, **body: Any) -> Any:
    """The answer, which must be as described."""
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return msgspec.json.decode(response.content, type=kind)


def refusal(server: RunningServer, path: str, status: int = 400, **body: Any) -> tuple[str | None, str]:
    response = server.http.post(path, json=body)
    assert response.status_code == status, response.text
    error = msgspec.json.decode(response.content, type=Error).error
    return error.param, error.message


def test_text_to_tokens_and_back(server: RunningServer, tokenizer: Tokenizer) -> None:
    found = ask(server, TOKENIZE, Tokenized, prompt=TEXT, model="tiny")
    assert found.tokens == tokenizer.encode(TEXT) and found.count == len(found.tokens)
    assert (found.max_model_len, found.token_strs) == (server.engine.config.limits.max_model_len, None)
    assert ask(server, DETOKENIZE, Detokenized, tokens=found.tokens).prompt == TEXT
    named = ask(server, "/v1/tokenize", Tokenized, prompt="<|im_start|>the fox", return_token_strs=True)
    assert named.token_strs[:2] == ["<|im_start|>", "the"] and named.token_strs[2].startswith("Ġ")
    assert ask(server, "/v1/detokenize", Detokenized, tokens=named.tokens).prompt == "<|im_start|>the fox"
    assert ask(server, TOKENIZE, Tokenized, prompt="").tokens == []
    assert ask(server, DETOKENIZE, Detokenized, tokens=[]).prompt == ""


def test_special_tokens_are_added_unless_refused(start: Callable[..., RunningServer], tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<|end|>", "add_bos_token": true}')
    server = start(folder)
    bare = ask(server, TOKENIZE, Tokenized, prompt="hello", add_special_tokens=False)
    assert ask(server, TOKENIZE, Tokenized, prompt="hello").tokens == [0, *bare.tokens]


@pytest.mark.parametrize(
    "chat",
    [
        {},
        {"add_generation_prompt": False},
        {"messages": [HELLO, {"role": "assistant", "content": "well"}], "continue_final_message": True},
        {"chat_template_kwargs": {"shout": True}},
        {"chat_template": HERMES, "tools": [WEATHER]},
        {"chat_template": HERMES, "tools": [WEATHER], "tool_choice": "none"},
        {"reasoning_effort": "low", "add_special_tokens": True},
    ],
)
def test_a_chat_has_the_tokens_that_are_computed(chat_server: RunningServer, chat: dict[str, Any]) -> None:
    chat = {"messages": [HELLO], **chat}
    found = ask(chat_server, TOKENIZE, Tokenized, **chat)
    assert found.tokens == prompt_of(chat_server, CHAT, chat)
    assert ask(chat_server, CHAT + "/render", RenderedRequest, **chat).token_ids == found.tokens


def prompt_of(server: RunningServer, path: str, body: dict[str, Any]) -> list[int]:
    """The prompt that the engine gets."""
    server.engine.requests.clear()
    response = server.post(path, {"max_tokens": 1, **body})
    assert response.status_code == 200, response.text
    return memoryview(server.engine.requests[0].token_ids).cast("i").tolist()


def test_a_prompt_may_be_longer_than_the_context(server: RunningServer) -> None:
    most = server.engine.config.limits.max_model_len
    assert ask(server, TOKENIZE, Tokenized, prompt="the fox " * most).count > most
    assert ask(server, TOKENIZE, Tokenized, messages=[{**HELLO, "content": "the fox " * most}]).count > most


def test_what_is_refused(server: RunningServer) -> None:
    vocab_size = server.engine.config.model.vocab_size
    assert refusal(server, TOKENIZE) == ("prompt", "send either prompt or messages")
    assert refusal(server, TOKENIZE, prompt="a", messages=[HELLO])[0] == "prompt"
    assert refusal(server, TOKENIZE, messages=[])[0] == "messages"
    assert refusal(server, TOKENIZE, prompt=5) == ("prompt", "prompt is 5, but must be a string")
    assert refusal(server, TOKENIZE, messages=[HELLO], chat_template="x")[0] == "chat_template"
    assert refusal(server, TOKENIZE, prompt="a", mm_processor_kwargs={"a": 1})[0] == "mm_processor_kwargs"
    assert refusal(server, TOKENIZE, 404, prompt="a", model="other")[0] == "model"
    assert refusal(server, DETOKENIZE) == ("tokens", "tokens is missing")
    assert refusal(server, DETOKENIZE, tokens=[1, vocab_size])[1].startswith(f"tokens: token id {vocab_size} is not")
    assert refusal(server, DETOKENIZE, tokens=[-1])[0] == "tokens[0]"
    ignored = server.http.post(TOKENIZE, json={"prompt": "a", "temprature": 1})
    assert ignored.headers["x-ignored-fields"] == "temprature"


def test_an_answer_that_repeats_a_grammar_is_bounded(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "MAX_RENDERED_BYTES", 30_000)
    body = {"prompt": [[1], [2], [3]], "structured_outputs": {"regex": "a" * 9000}}
    assert len(ask(server, COMPLETIONS + "/render", list[RenderedRequest], **body)) == 3
    body["prompt"].append([4])
    field, told = refusal(server, COMPLETIONS + "/render", **body)
    assert field == "prompt" and "more than 30000 bytes" in told


def test_a_text_that_fits_no_context_is_refused(start: Callable[..., RunningServer]) -> None:
    server = start(config={"max_model_len": 64})
    field, told = refusal(server, TOKENIZE, prompt="x" * (64 * 256 + 1))
    assert field == "prompt" and "16385 characters" in told


def test_a_model_without_tokenizer_says_so(start: Callable[..., RunningServer], tmp_path: Path) -> None:
    server = start(write_checkpoint(tmp_path, tokenizer=False))
    assert refusal(server, TOKENIZE, prompt="a") == (None, "this model has no tokenizer.json")
    assert refusal(server, DETOKENIZE, tokens=[1]) == (None, "this model has no tokenizer.json")


def test_bodies_are_as_described(server: RunningServer) -> None:
    document = server.http.get("/openapi.json").json()
    tokenize, detokenize = schema_of(document, "TokenizeBody"), schema_of(document, "DetokenizeBody")
    for good in ({"prompt": "a"}, {"messages": [HELLO], "tools": None, "return_token_strs": True}):
        tokenize.validate(good)
        assert server.http.post(TOKENIZE, json=good).status_code == 200
    for bad in ({}, {"prompt": "a", "messages": [HELLO]}, {"messages": []}, {"prompt": ["a"]}):
        assert not tokenize.is_valid(bad)
        assert server.http.post(TOKENIZE, json=bad).status_code == 400
    detokenize.validate({"tokens": [1]})
    assert not detokenize.is_valid({"tokens": ["1"]})


def test_long_texts_hold_up_nobody(start: Callable[..., RunningServer]) -> None:
    server = start(config={"max_model_len": 100_000})
    text = "fox jumps over " * 150_000
    with ThreadPoolExecutor(1) as other:
        slow = other.submit(server.http.post, TOKENIZE, json={"prompt": text, "return_token_strs": True})
        assert is_served_until(server, slow)
        tokens = slow.result(WAIT_S).json()["tokens"]
        assert len(tokens) > 250_000
        slow = other.submit(server.http.post, DETOKENIZE, json={"tokens": tokens})
        assert is_served_until(server, slow)
        assert slow.result(WAIT_S).json()["prompt"] == text
        slow = other.submit(server.http.post, COMPLETIONS + "/render", json={"prompt": [tokens[:90_000]] * 5})
        assert is_served_until(server, slow)
        assert [each["token_ids"] for each in slow.result(WAIT_S).json()] == [tokens[:90_000]] * 5


def test_an_answer_lists_so_many_tokens(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_ANSWERED_TOKENS", 5)
    told = "the answer would list 6 tokens, but may list 5; send less text"
    assert refusal(server, COMPLETIONS + "/render", prompt=[[1, 2, 3]] * 2) == ("prompt", told)
    assert len(ask(server, COMPLETIONS + "/render", list[RenderedRequest], prompt=[[1, 2, 3], [4, 5]])) == 2


def test_render_shows_what_the_engine_gets(server: RunningServer, tokenizer: Tokenizer) -> None:
    prompts = ["hello", "the quick brown fox"]
    body = {"prompt": prompts, "n": 2, "stop": "x", "logit_bias": {"5": 1}, "seed": 3, "cache_salt": "s"}
    found = ask(server, COMPLETIONS + "/render", list[RenderedRequest], **body)
    assert not server.engine.requests, "nothing is computed"
    assert [each.token_ids for each in found] == list(map(tokenizer.encode, prompts))
    assert server.post(COMPLETIONS, {**body}).status_code == 200
    for each, sent in zip(found, server.engine.requests[::2], strict=True):
        shown, params = each.sampling_params, sent.params
        assert shown == msgspec.json.decode(msgspec.json.encode(params)) | {"n": 2, "stop": ["x"]}
        assert (each.model, each.stream, each.cache_salt, each.priority) == ("tiny", False, "s", 0)
        assert memoryview(sent.token_ids).cast("i").tolist() == each.token_ids
    assert [each.request_id.rsplit("-")[-1] for each in found] == ["0", "2"]


def test_render_fits_the_context_and_truncates(server: RunningServer) -> None:
    most = server.engine.config.limits.max_model_len
    chat = ask(server, CHAT + "/render", RenderedRequest, messages=[HELLO])
    assert chat.request_id.startswith("chatcmpl-")
    assert chat.sampling_params["max_tokens"] == most - len(chat.token_ids)
    response = server.http.post(COMPLETIONS + "/render", json={"prompt": [7] * 9, "truncate_prompt_tokens": 4})
    assert response.json()[0]["token_ids"] == [7] * 4
    assert response.headers["x-truncated-prompt-tokens"] == "5"


def test_render_shows_grammars_and_refuses_those_that_do_not_compile(server: RunningServer) -> None:
    [found] = ask(server, COMPLETIONS + "/render", list[RenderedRequest], prompt="a", guided_regex="a+")
    assert found.sampling_params["guide"]["grammar"] == {"syntax": "regex", "text": "a+"}
    assert refusal(server, COMPLETIONS + "/render", prompt="a", guided_regex="(")[0] == "guided_regex"
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    chat = ask(server, CHAT + "/render", RenderedRequest, messages=[HELLO], response_format=schema)
    assert chat.sampling_params["guide"]["grammar"]["syntax"] == "json_schema"


@pytest.mark.parametrize("path", [TOKENIZE, DETOKENIZE, COMPLETIONS + "/render", CHAT + "/render"])
def test_bounds_are_those_of_generations(start: Callable[..., RunningServer], path: str) -> None:
    server = start(api_keys=("secret",), max_body_bytes=200)
    key = {"Authorization": "Bearer secret"}
    assert server.http.post(path, json={}).status_code == 401
    assert server.http.post(path, content=b"x" * 201, headers=key).status_code == 413
    assert server.http.post(path, content=b"{", headers=key).status_code == 400
    assert server.http.post(path, content=b"{}", headers=key | {"Content-Type": "text/plain"}).status_code == 415
    assert server.http.get(path, headers=key).status_code == 405
