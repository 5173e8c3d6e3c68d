"""Every refusal: its status, its shape, and that nothing a client sends is a 5xx."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from pypto_serving.errors import QueueFullError, UnavailableError
from pypto_serving.types.request import RequestFault
from tests.api.bad_bodies import BAD_COMPLETIONS, names_of
from tests.api.running import RunningServer
from tests.api.scripted_engine import Script
from tests.thinning import examples

PATH = "/v1/completions"
PATHS = [PATH, "/v1/chat/completions"]
FRIEND = "https://friend.example"
HELLO = {"role": "user", "content": "hello"}


def error_of(response: Any, status: int) -> dict[str, Any]:
    """The error object, whose shape is checked."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(("body", "param", "words"), BAD_COMPLETIONS, ids=names_of(BAD_COMPLETIONS))
def test_bad_requests_name_field_and_value(server: RunningServer, body: dict[str, Any], param: str, words: str) -> None:
    error = error_of(server.post(PATH, body), 400)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert words in error["message"]
    assert server.engine.requests == []


def test_a_context_error_names_both_lengths(start: Callable[..., RunningServer]) -> None:
    server = start(strict_max_tokens=True)
    error = error_of(server.post(PATH, {"prompt": [5] * 500, "max_tokens": 30}), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("This model's maximum context length is 512 tokens. However, ")
    for number in ("530 tokens", "500 in", "30 in", "at most 12"):
        assert number in error["message"]
    for path, field, prompt in (
        (PATH, "prompt", [5] * 512),
        (PATHS[1], "messages", [{"role": "user", "content": "a b c d e f g h " * 64}]),
    ):
        error = error_of(server.post(path, {field: prompt}), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", field)
        assert "leaves no room for an output token" in error["message"]
    assert server.post(PATH, {"prompt": [5] * 500}).status_code == 200
    assert server.engine.requests[-1].params.max_tokens == 12


NEUTRAL = {
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "echo": False,
    "best_of": 1,
    "suffix": None,
    "prompt_logprobs": None,
    "response_format": {"type": "text"},
    "store": False,
    "service_tier": "auto",
    "user": "me",
    "metadata": {"a": "b"},
    "safety_identifier": "x",
    "prompt_cache_key": "y",
}


@pytest.mark.parametrize(("path", "said"), [(PATHS[0], {"prompt": ["a", "b"]}), (PATHS[1], {"messages": [HELLO]})])
def test_priority_and_cache_salt_reach_the_engine(server: RunningServer, path: str, said: dict[str, Any]) -> None:
    response = server.post(path, {**said, "n": 2, "priority": -3, "cache_salt": "ü"})
    assert response.status_code == 200, response.text
    assert "x-ignored-fields" not in response.headers
    assert {(request.priority, request.cache_salt) for request in server.engine.requests} == {(-3, "ü")}
    server.post(path, {**said, "priority": None, "cache_salt": None})
    assert (server.engine.requests[-1].priority, server.engine.requests[-1].cache_salt) == (0, "")


def test_a_server_may_deny_priorities_to_clients(start: Callable[..., RunningServer]) -> None:
    server = start(client_priority=False)
    for path, said in ((PATHS[0], {"prompt": "a"}), (PATHS[1], {"messages": [HELLO]})):
        error = error_of(server.post(path, {**said, "priority": -5}), 400)
        assert (error["param"], error["code"]) == ("priority", "unsupported_field")
        assert "priority is -5, but this server lets no client choose one" in error["message"]
        assert server.post(path, {**said, "priority": 0}).status_code == 200


def test_neutral_and_ignored_fields_are_accepted(server: RunningServer) -> None:
    response = server.post(PATH, {"prompt": "a", **NEUTRAL})
    assert response.status_code == 200
    assert "x-ignored-fields" not in response.headers


def test_unknown_fields_are_listed_and_warned_about_once(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"prompt": "a", "max_token": 5, "wünsch\n": 1, "stream_options": {"mystery": 1}, "stream": True}
    for _ in range(2):
        response = server.post(PATH, body)
        assert response.headers["x-ignored-fields"] == "max_token, w?nsch?, stream_options.mystery"
    warned = [record.getMessage() for record in caplog.records if "unknown request field" in record.getMessage()]
    assert len(warned) == 3


def test_an_unknown_model_is_a_404_that_lists_the_names(server: RunningServer) -> None:
    for response in (server.post(PATH, {"prompt": "a", "model": "gpt"}), server.http.get("/v1/models/gpt")):
        error = error_of(response, 404)
        assert error["code"] == "model_not_found"
        assert "'gpt'" in error["message"]
        assert "'tiny', 'tiny-alias'" in error["message"]
    with pytest.raises(openai.NotFoundError):
        server.openai().completions.create(model="gpt", prompt="a")
    assert server.post(PATH, {"prompt": "a", "model": "tiny-alias"}).json()["model"] == "tiny-alias"


@pytest.mark.parametrize("path", ["/v1/files", "/files/file-1", "//v1/batches"])
def test_what_needs_a_folder_says_so(server: RunningServer, path: str) -> None:
    error = error_of(server.http.get(path), 404)
    assert error["message"].endswith(
        " is off; give the server the option batch-dir, a folder that keeps files and batches"
    )


def test_routes_that_do_not_exist(server: RunningServer) -> None:
    error = error_of(server.post("/v1/embeddings", {}), 404)
    assert error["message"].startswith("POST /v1/embeddings does not exist; there are POST /v1/completions, ")
    assert "GET /v1/models/{model_id}" in error["message"] and error["code"] == "unknown_url"
    for method, path, allowed in (
        ("GET", PATH, "POST"),
        ("POST", "/health", "GET, HEAD"),
        ("PUT", "/v1/models/a/b", "GET, HEAD"),
    ):
        response = server.http.request(method, path)
        assert f"{method} {path} is not allowed here; use " in error_of(response, 405)["message"]
        assert response.headers["allow"] == allowed


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"3", b"null", b'{"prompt": "\\ud800"}', b"\xff", b"[" * 5000])
def test_bodies_that_are_no_json_objects(server: RunningServer, raw: bytes) -> None:
    for path in PATHS:
        error_of(server.http.post(path, content=raw), 400)


def test_an_error_repeats_little_of_what_was_sent(server: RunningServer) -> None:
    bodies = {"model": "x" * 10**6, "prompt": "a"}, {"messages": [{"role": "x" * 10**6, "content": "a"}]}
    for path, body in zip(PATHS, bodies, strict=True):
        response = server.post(path, body)
        assert response.status_code >= 400 and len(response.content) < 3000


def test_a_body_over_the_limit(server: RunningServer) -> None:
    for size in (100_001, 390_000):
        error = error_of(server.http.post(PATH, content=b" " * size), 413)
        assert "100000 bytes" in error["message"]


def test_a_full_queue_is_a_429_with_retry_after(server: RunningServer) -> None:
    server.engine.refusal = QueueFullError("the queue is full", 7)
    for stream in (False, True):
        response = server.post(PATH, {"prompt": "a", "stream": stream})
        assert error_of(response, 429)["code"] == "queue_full"
        assert response.headers["retry-after"] == "7"
    with pytest.raises(openai.RateLimitError):
        server.openai().completions.create(model="tiny", prompt="a")


def test_an_engine_that_cannot_serve_is_a_503(server: RunningServer) -> None:
    server.engine.refusal = UnavailableError("still loading")
    response = server.post(PATH, {"prompt": "a"})
    assert error_of(response, 503)["message"] == "still loading"
    assert int(response.headers["retry-after"]) > 0


def test_a_fault_before_the_first_token_has_its_own_status_or_is_an_event(server: RunningServer) -> None:
    server.engine.script = lambda request: Script([], fault=RequestFault(503, "queue_timeout", "waited\u2028too long"))
    error = error_of(server.post(PATH, {"prompt": "a"}), 503)
    assert (error["message"], error["code"]) == ("waited\u2028too long", "queue_timeout")
    stream = server.post(PATH, {"prompt": "a", "stream": True})
    assert (stream.status_code, len(stream.text.splitlines())) == (200, 2)
    assert json.loads(stream.text.removeprefix("data: "))["error"] == error


@pytest.mark.parametrize("value", [0, -1, None])
def test_no_pings_are_sent_unless_asked_for(server: RunningServer, value: int | None) -> None:
    assert server.post(PATH, {"prompt": "a", "sse_ping_interval": value}).status_code == 200
    for wrong in (-2, 3601, "1", 0.5):
        error = error_of(server.post(PATH, {"prompt": "a", "sse_ping_interval": wrong}), 400)
        assert error["param"] == "sse_ping_interval"


def test_a_fault_within_a_stream_ends_it_with_an_error_event(server: RunningServer) -> None:
    fault = RequestFault(500, "request_failed", "three workers died")
    server.engine.script = lambda request: Script([5, 6, 7] * 9, fault=fault if request.choice == 0 else None)
    server.engine.seed = 1
    response = server.post(PATH, {"prompt": "a", "stream": True, "max_tokens": 99})
    *_, last, rest = response.text.split("\n\n")
    assert (response.status_code, rest) == (200, "")
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "three workers died"
    with pytest.raises(openai.APIError, match="three workers died"):
        list(server.openai().completions.create(model="tiny", prompt="a", stream=True, max_tokens=99))


def test_a_fault_of_one_choice_aborts_the_others(server: RunningServer) -> None:
    fault = RequestFault(500, "request_failed", "no")
    server.engine.script = lambda r: Script([], fault=fault) if r.choice == 1 else Script([], hang=True)
    error_of(server.post(PATH, {"prompt": "a", "n": 3}), 500)
    assert len(server.engine.aborted) == 2


def test_an_unforeseen_error_is_a_500_without_details(
    start: Callable[..., RunningServer], caplog: pytest.LogCaptureFixture
) -> None:
    server = start(allowed_origins=(FRIEND,))

    def broken(request: object) -> Script:
        raise ZeroDivisionError("secret")

    server.engine.script = broken
    for path, body in ((PATH, {"prompt": "a"}), (PATHS[1], {"messages": [HELLO], "stream": True})):
        response = server.http.post(path, json=body, headers={"x-request-id": "mine", "origin": FRIEND})
        message = error_of(response, 500)["message"]
        assert "secret" not in message and "under mine" in message
        assert response.headers["x-request-id"] == "mine"
        assert response.headers["access-control-allow-origin"] == FRIEND
    assert "request mine failed" in caplog.text and "ZeroDivisionError: secret" in caplog.text
    counted = 'pypto:http_responses_total{model_name="tiny",status="500"} 2.0'
    assert counted in server.http.get("/metrics").text


def test_an_unforeseen_error_within_a_stream_is_named_too(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(form: object, delta: object) -> bytes:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr("pypto_serving.api.openai.chat.EventFormat.event", broken)
    response = server.post(PATH, {"prompt": "a", "stream": True})
    message = json.loads(response.text.removeprefix("data: "))["error"]["message"]
    name = re.search(r"cmpl-\w+", message)
    assert name and f"stream {name[0]} failed" in caplog.text and "secret" not in message


def test_the_api_key_guards_everything_but_health(start: Callable[..., RunningServer]) -> None:
    server = start(api_keys=("käse-key",))
    for path in (
        "/v1/models",
        "/metrics",
        "/version",
        "/docs",
        "/openapi.json",
        "/nowhere",
        "/healthy",
        "//v1//models",
    ):
        response = server.http.get(path)
        assert error_of(response, 401)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    for path in PATHS:
        error_of(server.post(path, {"prompt": "a"}), 401)
    for value in ("Bearer wrong", "käse-key", "Basic käse-key", "Bearer", "Bearer käse-key x"):
        error_of(server.http.get("/v1/models", headers={"authorization": value.encode()}), 401)
    assert server.http.get("/health").status_code == 200
    for value in ("Bearer käse-key", "bearer  käse-key"):
        assert server.http.get("/v1/models", headers={"authorization": value.encode()}).status_code == 200


def test_the_earlier_deadline_counts(server: RunningServer) -> None:
    for timeout, header, least in ((30, None, 30), (None, "20", 20), (30, "7.5", 7.5), (5, "7.5", 5)):
        before_s = time.monotonic()
        headers = {} if header is None else {"X-Request-Timeout": header}
        assert server.http.post(PATH, json={"prompt": "a", "timeout": timeout}, headers=headers).status_code == 200
        deadline_s = server.engine.requests[-1].deadline_s
        assert deadline_s is not None and before_s <= deadline_s - least <= time.monotonic()
    server.post(PATH, {"prompt": "a"})
    assert server.engine.requests[-1].deadline_s is None
    for header in ("0", "-1", "soon", "nan", "inf", "1e9", ""):
        refused = server.http.post(PATH, json={"prompt": "a"}, headers={"X-Request-Timeout": header})
        assert error_of(refused, 400)["param"] == "x-request-timeout"


FIELDS = ["model", "prompt", "messages", "n", "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens"]
FIELDS += ["priority", "cache_salt"]
FIELDS += ["stop", "stop_token_ids", "ignore_eos", "seed", "logprobs", "top_logprobs", "stream", "stream_options"]
FIELDS += ["echo", "logit_bias", "tools", "chat_template_kwargs", "add_generation_prompt", "content", "role", "x"]
NUMBERS = st.one_of(
    st.integers(-5, 20), st.integers(), st.sampled_from([2**63, 2**64, 10**400, -(10**30)]), st.floats()
)
SCALARS = st.one_of(
    st.none(), st.booleans(), NUMBERS, st.text(max_size=20), st.sampled_from(["hello", "user", "\ud800"])
)
NAMES = st.sampled_from(FIELDS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(NAMES, inner, max_size=4)),
    max_leaves=12,
)
VALID = {"prompt": "hello", "messages": [{"role": "user", "content": "hello"}]}


@examples(300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.dictionaries(NAMES, VALUES, max_size=5), path=st.sampled_from(PATHS), valid=st.booleans())
def test_no_json_object_makes_the_server_fail(
    server: RunningServer, body: dict[str, Any], path: str, valid: bool
) -> None:
    if valid:
        body = body | {key: value for key, value in VALID.items() if (key == "prompt") == (path == PATH)}
    response = server.http.post(path, content=json.dumps(body))
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        error_of(response, response.status_code)


@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.one_of(st.binary(max_size=60), st.text(max_size=60).map(str.encode)))
def test_no_bytes_make_the_server_fail(server: RunningServer, raw: bytes) -> None:
    error_of(server.http.post(PATH, content=raw), 400)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("part", "stream"),
    [("openai.chat.EventFormat.__init__", False), ("common.respond.EventStream.init_headers", True)],
)
def test_a_defect_before_the_answer_leaves_nothing_registered(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, path: str, part: str, stream: bool
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as broken:
        broken.setattr(f"pypto_serving.api.{part}", fails)
        asked = {"messages": [HELLO]} if path.startswith("/v1/chat") else {"prompt": "a"}
        error_of(server.post(path, {**asked, "stream": stream}), 500)
    assert (server.service.admission.in_flight, server.engine.requests) == (0, [])
