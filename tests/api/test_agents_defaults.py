"""What agents and SDKs send without being asked: taken where it can be, and named where it has no effect."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from pypto_serving.errors import QueueFullError
from pypto_serving.types.arrays import unpack_ids
from tests.api.chat_events import join_events
from tests.api.running import CHAT, COMPLETIONS, RunningServer
from tests.api.scripted_engine import Script

RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
HELLO = {"role": "user", "content": "hello"}
IGNORED = "x-ignored-fields"
Start = Callable[..., RunningServer]
LIMITED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [HELLO]}, "max_tokens"),
    (CHAT, {"messages": [HELLO]}, "max_completion_tokens"),
    (COMPLETIONS, {"prompt": "hello"}, "max_tokens"),
    (RESPONSES, {"input": "hello"}, "max_output_tokens"),
]


@pytest.mark.parametrize(("path", "body", "field"), LIMITED)
def test_max_tokens_are_cut_to_the_room(server: RunningServer, path: str, body: dict[str, Any], field: str) -> None:
    server.engine.script = lambda request: Script([70] * 1000)
    answer = server.http.post(path, json={**body, field: 32_000})
    assert answer.status_code == 200, answer.text
    (request,) = server.engine.requests
    num_prompt = len(request.token_ids) // 4
    assert request.params.max_tokens == 512 - num_prompt
    whole = answer.json()
    counts = whole["usage"].get("completion_tokens", whole["usage"].get("output_tokens"))
    assert counts == 512 - num_prompt
    if path == RESPONSES:
        assert (whole["status"], whole["max_output_tokens"]) == ("incomplete", 32_000)
    else:
        assert whole["choices"][0]["finish_reason"] == "length"


def test_a_stream_whose_max_tokens_are_cut(server: RunningServer) -> None:
    server.engine.script = lambda request: Script([70] * 1000)
    assert join_events(server.events(CHAT, {"messages": [HELLO], "max_tokens": 32_000}))["finish_reason"] == "length"


@pytest.mark.parametrize(("path", "body", "field"), LIMITED)
def test_a_strict_server_refuses_them(start: Start, path: str, body: dict[str, Any], field: str) -> None:
    server = start(strict_max_tokens=True)
    error = server.http.post(path, json={**body, field: 32_000}).json()["error"]
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")
    assert server.http.post(path, json={**body, field: 100}).status_code == 200


@pytest.mark.parametrize("text", ["a " * 400, "a" * 600, "a" * 200_000])
def test_agents_know_a_prompt_that_is_too_long_by_its_words(start: Start, text: str) -> None:
    server = start()
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": text}]}
    for content in (body, body | {"metadata": {"user_id": "x" * 20_000}}):  # read here, and by the reader
        answer = server.http.post(MESSAGES, json=content)
        assert answer.status_code == 400
        error = answer.json()["error"]
        found = re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", error["message"])
        assert found and int(found[1]) > int(found[2]) == 512 and error["type"] == "invalid_request_error"
        assert error["details"]["error_code"] == "context_length_exceeded"


@pytest.mark.parametrize("strict", [False, True])
def test_agents_know_the_words_of_openai_for_it(start: Start, strict: bool) -> None:
    """Fantasy, of which Crush is made, reads both numbers so; LangChain and others the second half."""
    server = start(strict_max_tokens=strict)
    words = re.compile(r"maximum context length (?:is|of) (\d+) tokens.*?(?:resulted in|requested) ~?(\d+) tokens")
    body = {"messages": [HELLO]} | ({"max_tokens": 600} if strict else {"messages": [HELLO] * 600})
    found = words.search(server.http.post(CHAT, json=body).json()["error"]["message"])
    assert found and int(found[2]) > int(found[1]) == 512


def test_a_prompt_of_just_the_context_is_too_long(server: RunningServer) -> None:
    def said(count: int) -> dict[str, Any]:
        return {"max_tokens": 9, "messages": [{"role": "user", "content": "!" * count}]}

    one = server.http.post(COUNT, json=said(1)).json()["input_tokens"]
    assert server.http.post(MESSAGES, json=said(512 - one)).status_code == 200
    message = server.http.post(MESSAGES, json=said(513 - one)).json()["error"]["message"]
    assert message == "prompt is too long: 512 tokens > 511 maximum"


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_final_refusals_say_so(start: Start, path: str) -> None:
    server = start(api_keys=("secret",))
    body = {"messages": [HELLO], "max_tokens": 9}
    key = {"authorization": "Bearer secret"}
    final = [
        server.http.post(path, json=body),
        server.http.post(path, json=body | {"model": "none"}, headers=key),
        server.http.post(path, json=body | {"max_tokens": -1}, headers=key),
        server.http.post(path, content=b"x", headers={**key, "content-type": "text/plain"}),
        server.http.put(path, headers=key),
        server.http.get("/v1/none", headers=key),
        server.http.get("/v1/models", headers={"x": "y" * (1 << 17)}),
    ]
    assert [answer.status_code for answer in final] == [401, 404, 400, 415, 405, 404, 431]
    assert [answer.headers.get("x-should-retry") for answer in final] == ["false"] * len(final)
    server.engine.refusal = QueueFullError("full", 3)
    passing = server.http.post(path, json=body, headers=key)
    assert passing.status_code == 429 and "x-should-retry" not in passing.headers


@pytest.mark.parametrize(
    ("path", "fields", "ignored"),
    [
        (CHAT, {"verbosity": "low", "store": True}, "verbosity, store"),
        (CHAT, {"verbosity": "medium", "store": False, "prediction": None}, None),
        (
            CHAT,
            {"prediction": {"type": "content", "content": "x"}, "web_search_options": {}},
            "prediction, web_search_options",
        ),
        (CHAT, {"service_tier": "turbo"}, "service_tier"),
        (COMPLETIONS, {"store": True}, "store"),
        (RESPONSES, {"truncation": "auto"}, "truncation"),
        (RESPONSES, {"truncation": "disabled", "context_management": []}, None),
        (RESPONSES, {"max_tool_calls": 3, "moderation": {}}, "max_tool_calls, moderation"),
        (RESPONSES, {"reasoning": {"summary": "verbose"}}, "reasoning.summary"),
        (
            RESPONSES,
            {"include": ["web_search_call.results", "reasoning.encrypted_content"]},
            "include.web_search_call.results",
        ),
        (MESSAGES, {"thinking": {"type": "adaptive", "display": "updates"}}, "thinking.display"),
        (COUNT, {"thinking": {"type": "enabled", "budget_tokens": 3, "display": "updates"}}, "thinking.display"),
        (MESSAGES, {"container": "c", "mcp_servers": [{"url": "http://x"}]}, "container, mcp_servers"),
    ],
)
def test_what_only_changes_what_is_shown_is_taken_and_named(
    server: RunningServer, path: str, fields: dict[str, Any], ignored: str | None
) -> None:
    said = {COMPLETIONS: {"prompt": "hello"}, RESPONSES: {"input": "hello"}}.get(path, {"messages": [HELLO]})
    limit = {"max_tokens": 20} if path in (MESSAGES, CHAT) else {}
    answer = server.http.post(path, json={**said, **limit, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.headers.get(IGNORED) == ignored


def test_log_probabilities_of_chosen_ids(server: RunningServer) -> None:
    """In place of the most likely ones, streamed too."""
    wanted = [5, 300, 7]
    body = {"messages": [HELLO], "max_tokens": 3, "logprobs": True, "logprob_token_ids": wanted}
    scored = server.post(CHAT, body).json()["choices"][0]["logprobs"]["content"]
    streamed = [
        e["choices"][0]["logprobs"]["content"] for e in server.events(CHAT, body) if e["choices"][0]["logprobs"]
    ]
    assert [token for tokens in streamed for token in tokens] == scored
    assert all(len(token["top_logprobs"]) == 3 for token in scored) and len(scored) == 3
    assert server.engine.requests[-1].params.logprob_token_ids == tuple(wanted)
    plain = {"prompt": "hello", "max_tokens": 2, "logprob_token_ids": wanted, "return_tokens_as_token_ids": True}
    top = server.post(COMPLETIONS, plain).json()["choices"][0]["logprobs"]["top_logprobs"]
    assert {"token_id:5", "token_id:300", "token_id:7"} <= top[0].keys()
    for bad in ([10**6], [-1], [1] * 129, "x"):
        error = server.post(COMPLETIONS, plain | {"logprob_token_ids": bad}).json()["error"]
        assert error["param"].startswith("logprob_token_ids")


@pytest.mark.parametrize(("side", "kept"), [("left", [3, 4]), ("right", [1, 2]), (None, [3, 4])])
def test_a_prompt_is_cut_at_either_side(server: RunningServer, side: str | None, kept: list[int]) -> None:
    body = {"prompt": [1, 2, 3, 4], "truncate_prompt_tokens": 2, "truncation_side": side, "max_tokens": 1}
    answer = server.post(COMPLETIONS, body)
    assert unpack_ids(server.engine.requests[-1].token_ids).tolist() == kept
    assert answer.headers["x-truncated-prompt-tokens"] == "2"
    whole = {"messages": [HELLO], "truncate_prompt_tokens": 4, "truncation_side": side, "return_token_ids": True}
    server.post(CHAT, whole | {"truncate_prompt_tokens": None})
    ids = unpack_ids(server.engine.requests[-1].token_ids).tolist()
    server.post(CHAT, whole)
    cut = unpack_ids(server.engine.requests[-1].token_ids).tolist()
    assert cut == (ids[:4] if side == "right" else ids[-4:])


@pytest.mark.parametrize(
    ("path", "fields", "word"),
    [
        (COMPLETIONS, {"prompt": "a", "max_tokens": -1}, "greater_than_equal"),
        (COMPLETIONS, {"prompt": "a", "temperature": -1}, "greater_than_equal"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "less_than_equal"),
        (COMPLETIONS, {"prompt": "a", "prompt_logprobs": -2}, "greater_than_equal"),
        (CHAT, {"messages": [HELLO], "top_logprobs": 21, "logprobs": True}, "less_than_equal"),
        (CHAT, {"messages": [HELLO], "top_logprobs": -1, "logprobs": True}, "greater_than_equal"),
        (CHAT, {"messages": [HELLO], "thinking_token_budget": -1}, "greater_than_equal"),
        (CHAT, {"messages": [HELLO], "n": 129}, "less_than_equal"),
    ],
)
def test_refused_numbers_have_the_words_of_vllm(
    server: RunningServer, path: str, fields: dict[str, Any], word: str
) -> None:
    assert word in server.post(path, fields).json()["error"]["message"]
