"""What holders of API keys may use, from the client's side."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from pypto_serving.api.http.allowance import Bucket
from pypto_serving.types.api_keys import read_api_keys
from tests.api.running import CHAT, COMPLETIONS, RunningServer
from tests.api.scripted_engine import Script


def key(name: str, **limits: int) -> str:
    return json.dumps({"key": f"{name}-secret", "name": name, **limits})


def ask(server: RunningServer, name: str, path: str = COMPLETIONS, **body: Any) -> httpx.Response:
    text = {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {"prompt": "hello"}
    headers = {"Authorization": f"Bearer {name}-secret"}
    return server.http.post(path, json={"max_tokens": 2, **text, **body}, headers=headers)


def assert_refused(answer: httpx.Response, *words: str) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (429, "rate_limit_exceeded", "rate_limit_error")
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    for word in words:
        assert word in error["message"], error


def metrics(server: RunningServer) -> dict[str, float]:
    text = server.http.get("/metrics", headers={"x-api-key": "free"}).text
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("pypto:key_")]
    return {name.removeprefix("pypto:key_"): float(value) for name, value in lines}


def test_requests_in_a_minute(start: Callable[..., RunningServer]) -> None:
    server = start(api_keys=(key("team-a", requests_per_minute=3), "free"))
    left = []
    for path in (COMPLETIONS, CHAT, COMPLETIONS):
        answer = ask(server, "team-a", path)
        assert answer.status_code == 200 and answer.headers["x-ratelimit-limit-requests"] == "3"
        left.append(answer.headers["x-ratelimit-remaining-requests"])
    assert left == ["2", "1", "0"]
    refused = ask(server, "team-a")
    assert_refused(refused, "'team-a' may use 3 requests in a minute")
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert 40 <= int(refused.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 60
    others = server.http.post(COMPLETIONS, json={"prompt": "a"}, headers={"Authorization": "Bearer free"})
    assert others.status_code == 200 and "x-ratelimit-limit-requests" not in others.headers
    with pytest.raises(openai.RateLimitError) as error:
        server.openai("team-a-secret").completions.create(model="tiny", prompt="a")
    assert error.value.response.headers["retry-after"]
    found = metrics(server)
    assert found['requests_total{key="team-a"}'] == 3 and found['requests_total{key="unnamed"}'] == 1
    assert found['refusals_total{key="team-a",limit="requests"}'] == 2


def test_a_refusal_in_the_form_of_anthropics_api(start: Callable[..., RunningServer]) -> None:
    server = start(api_keys=(key("a", requests_per_minute=1),))
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "model": "tiny"}
    first, second = (server.http.post("/v1/messages", json=body, headers={"x-api-key": "a-secret"}) for _ in range(2))
    assert (first.status_code, second.status_code) == (200, 429)
    assert second.json()["error"]["type"] == "rate_limit_error" and "retry-after" in second.headers


def test_tokens_in_a_minute(start: Callable[..., RunningServer]) -> None:
    """A request is admitted while any are left; what it uses beyond is missing later."""
    server = start(api_keys=(key("a", tokens_per_minute=12), "free"))
    used = 0
    while used < 12:
        answer = ask(server, "a", max_tokens=5)
        assert answer.status_code == 200
        used += answer.json()["usage"]["total_tokens"]
        server.wait_idle()
    refused = ask(server, "a")
    assert_refused(refused, "'a' may use 12 tokens in a minute")
    assert (
        refused.headers["x-ratelimit-limit-tokens"] == "12" and refused.headers["x-ratelimit-remaining-tokens"] == "0"
    )
    assert int(refused.headers["retry-after"]) >= (used - 12) * 5
    found = metrics(server)
    assert found['prompt_tokens_total{key="a"}'] + found['generation_tokens_total{key="a"}'] == used
    assert found['refusals_total{key="a",limit="tokens"}'] == 1


@pytest.fixture
def hanging(start: Callable[..., RunningServer]) -> Iterator[Callable[..., RunningServer]]:
    def started(*keys: str) -> RunningServer:
        server = start(api_keys=keys)
        tokens = server.engine.script(None).tokens  # type: ignore[arg-type]
        server.engine.script = lambda request: Script(tokens, hang=True)
        return server

    yield started


def test_unfinished_requests(hanging: Callable[..., RunningServer]) -> None:
    """Those of both keys of a name; one that ends makes room, as does one whose client leaves."""
    other = json.dumps({"key": "new-secret", "name": "a", "max_concurrent": 1})
    server = hanging(key("a", max_concurrent=1), other, "free")
    body, headers = {"prompt": "a", "stream": True}, {"Authorization": "Bearer a-secret"}
    for ends in (True, False):
        with server.http.stream("POST", COMPLETIONS, json=body, headers=headers) as response:
            lines = response.iter_lines()
            next(lines)
            assert metrics(server)['requests_running{key="a"}'] == 1
            assert_refused(ask(server, "a"), "'a' may have 1 unfinished requests at once")
            assert_refused(ask(server, "new"))
            if ends:
                server.call(server.engine.submissions[-1].finish)
                list(lines)
        server.wait_idle()
    assert metrics(server)['requests_running{key="a"}'] == 0
    assert metrics(server)['refusals_total{key="a",limit="concurrent"}'] == 4


def test_the_file_changes_limits_and_keys_while_use_goes_on(
    start: Callable[..., RunningServer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pypto_serving.api")
    file = tmp_path / "keys"
    file.write_text(f"# ours\n{key('a', requests_per_minute=1)}\nfree\n")
    server = start(api_keys=tuple(file.read_text().splitlines()[1:]), api_key_file=str(file))
    assert [ask(server, "a").status_code for _ in range(2)] == [200, 429]
    rotated = json.dumps({"key": "new-secret", "name": "a", "requests_per_minute": 1})
    file.write_text(f"{rotated}\nfree\n")
    server.call(server.server.reload)
    assert (ask(server, "a").status_code, ask(server, "new").status_code) == (401, 429)
    file.write_text(f"{key('a', requests_per_minute=5)}\nfree\n")
    server.call(server.server.reload)
    assert ask(server, "a").status_code == 200
    file.write_text('{"key": "very-secret", "nmae": "a"}\n')
    server.call(server.server.reload)
    assert "unknown field `nmae`" in caplog.text and "very-secret" not in caplog.text
    assert ask(server, "a").status_code == 200
    assert metrics(server)['requests_total{key="a"}'] == 3


def test_a_batch_is_under_the_limits_of_its_owner(start: Callable[..., RunningServer], tmp_path: Path) -> None:
    server = start(api_keys=(key("a", requests_per_minute=2), "free"), batch_dir=str(tmp_path))
    lines = [
        json.dumps(
            {"custom_id": str(i), "method": "POST", "url": COMPLETIONS, "body": {"prompt": "a", "max_tokens": 1}}
        )
        for i in range(3)
    ]
    client = server.openai("a-secret")
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    server.wait_for(lambda: server.service.keys.allowances["a"].refused["requests"] > 0)
    counts = client.batches.retrieve(made.id).request_counts
    assert counts is not None and (counts.completed, counts.failed) == (2, 0)
    assert metrics(server)['requests_total{key="a"}'] == 2


def test_a_bucket_refills_steadily() -> None:
    now_s = 0.0
    bucket = Bucket(60, lambda: now_s)
    bucket.take(100)
    assert (bucket.left(), bucket.wait_s(1), bucket.wait_s(60)) == (-40, 41, 100)
    now_s = 30.5
    assert (bucket.left(), bucket.wait_s(1)) == (-9.5, 11)
    now_s = 1000.0
    assert bucket.left() == 60


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        (['{"key": "k"'], "truncated"),
        (['{"key": ""}'], "length >= 1 - at `$.key`"),
        (['{"name": "a"}'], "missing required field `key`"),
        (['{"key": "k", "requests_per_minute": 0}'], ">= 1 - at `$.requests_per_minute`"),
        (['{"key": "k", "max_concurrent": "4"}'], "got `str` - at `$.max_concurrent`"),
        (['{"key": "k", "requests": 1}'], "unknown field `requests`"),
        (['{"key": "k", "name": "a", "max_concurrent": 1}', '{"key": "l", "name": "a"}'], "different limits"),
        (["plain", '{"key": "l", "max_concurrent": 1}'], "different limits for the name 'unnamed'"),
    ],
)
def test_what_is_wrong_is_said(texts: list[str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem.replace("$", r"\$")):
        read_api_keys(texts)
