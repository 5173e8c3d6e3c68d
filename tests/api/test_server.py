"""Service endpoints, disconnects, drain, and running the server."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pypto_serving.api.http.listening import bind
from pypto_serving.api.settings import DefaultSampling, ServingConfig, default_sampling
from pypto_serving.api.text.files import read_generation_config
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.engine.client import Health
from pypto_serving.errors import ConfigError, ModelError, QueueFullError
from tests.api.checkpoint import TEXT
from tests.api.running import RunningServer
from tests.api.scripted_engine import WAIT_S, Script

PATH = "/v1/completions"


def test_models(server: RunningServer, checkpoint: Path) -> None:
    models = server.http.get("/v1/models").json()
    assert (models["object"], [entry["id"] for entry in models["data"]]) == ("list", ["tiny", "tiny-alias"])
    entry = server.http.get("/v1/models/tiny").json()
    assert entry == models["data"][0]
    assert (entry["object"], entry["owned_by"], entry["root"]) == ("model", "pypto-serving", str(checkpoint))
    assert entry["max_model_len"] == 512
    filters = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.0}
    assert entry["default_sampling"] == {**filters, "repetition_penalty": 1.0}
    assert [model.id for model in server.openai().models.list()] == ["tiny", "tiny-alias"]
    assert server.openai().models.retrieve("tiny-alias").id == "tiny-alias"


def test_model_names_with_a_slash(start: Callable[..., RunningServer]) -> None:
    server = start(served_model_names=("org/model",))
    assert server.http.get("/v1/models/org/model").json()["id"] == "org/model"
    assert server.openai().models.retrieve("org/model").id == "org/model"


@pytest.mark.parametrize(
    "path",
    [
        *("//v1//models", "/v1/models/", "///v1/models//", "/models", "/v1/v1/models", "//models/tiny"),
        *("/v1/health", "/v1/version", "/v1/v1//metrics", "/v1/openapi.json", "/v1/ping", "/v1//ready/", "/"),
    ],
)
def test_superfluous_slashes_and_versions_are_tolerated(server: RunningServer, path: str) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200")


def test_version_and_documentation(server: RunningServer) -> None:
    import pypto_serving

    assert server.http.get("/version").json() == {"version": pypto_serving.__version__}
    paths = server.http.get("/openapi.json").json()["paths"]
    assert {PATH, "/v1/chat/completions", "/v1/models", "/health", "/metrics"} <= set(paths)


def test_health_follows_the_engine(server: RunningServer) -> None:
    assert server.http.get("/health").json() == {"status": "ready", "detail": "", "last_step_age_s": 0.25}
    server.engine.state = Health(ok=False, status="stalled", detail="work waits", age_s=200.0)
    response = server.http.get("/health")
    assert response.status_code == 503
    assert response.json() == {"status": "stalled", "detail": "work waits", "last_step_age_s": 200.0}


def test_readiness_follows_the_queue_too(server: RunningServer) -> None:
    get = server.http.get
    assert [get(path).status_code for path in ("/ready", "/ping", "/health")] == [200, 200, 200]
    assert server.http.post("/ping").json() == get("/health").json()
    server.engine.refusal = QueueFullError("full", 3)
    full = get("/ready")
    assert (full.status_code, full.headers["retry-after"], get("/health").status_code) == (429, "3", 200)
    server.engine.refusal = None
    server.engine.state = Health(ok=False, status="loading", age_s=0.0)
    assert [get(path).status_code for path in ("/ready", "/ping", "/health")] == [503, 503, 503]
    assert server.http.head("/ready").status_code == 503


def test_probes_need_no_key(start: Callable[..., RunningServer]) -> None:
    server = start(api_keys=("secret",))
    paths = ("/health", "/ready", "/ping", "/v1/health", "/load", "/server_info", "/models")
    assert [server.http.get(path).status_code for path in paths] == [200, 200, 200, 200, 401, 401, 401]


def test_load_counts_requests(server: RunningServer) -> None:
    assert server.http.get("/load").json()["server_load"] == 0
    server.engine.script = lambda request: Script([], hang=True)
    connection = server.raw_post(PATH, {"prompt": "hello"})
    server.engine.wait_for(lambda: len(server.engine.requests) == 1)
    assert server.http.get("/load").json()["server_load"] == 1
    connection.close()
    server.wait_idle()
    assert server.http.get("/load").json()["server_load"] == 0


def test_what_the_server_is(server: RunningServer) -> None:
    info = server.http.get("/server_info").json()
    assert (info["served_model_names"], info["max_model_len"], info["backend"]) == (["tiny", "tiny-alias"], 512, "null")
    assert info["kv_groups"] == [{"name": "full", "block_size": 16, "num_blocks": 100}]


def test_metrics(start: Callable[..., RunningServer]) -> None:
    server = start()
    server.post(PATH, {"prompt": "hello", "max_tokens": 5})
    server.post(PATH, {"prompt": ""})
    text = server.http.get("/metrics").text
    for line in (
        'vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"} 1.0',
        'vllm:request_generation_tokens_sum{engine="0",model_name="tiny"} 5.0',
        'vllm:time_to_first_token_seconds_count{engine="0",model_name="tiny"} 1.0',
        'vllm:iteration_tokens_total_count{engine="0",model_name="tiny"} 1.0',
        'pypto:http_responses_total{model_name="tiny",status="200"} 1.0',
        'pypto:http_responses_total{model_name="tiny",status="400"} 1.0',
    ):
        assert line in text


def test_request_ids(server: RunningServer) -> None:
    own = server.http.get("/version", headers={"x-request-id": "mine-1"}).headers["x-request-id"]
    made = [server.http.get("/version", headers={"x-request-id": bad}).headers["x-request-id"] for bad in ("", "a b")]
    assert own == "mine-1"
    assert all(len(request_id) == 32 for request_id in made)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [0, 9])
def test_a_disconnect_aborts_the_request(
    server: RunningServer, tokenizer: Tokenizer, stream: bool, tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    """In the queue and in prefill nothing was sent yet; in decode a stream has begun."""
    caplog.set_level(logging.INFO, "pypto_serving.api")
    engine = server.engine
    engine.script = lambda request: Script(tokenizer.encode(TEXT)[:tokens], hang=True)
    connection = server.raw_post(PATH, {"prompt": "hello", "n": 2, "stream": stream, "max_tokens": 99})
    engine.wait_for(lambda: len(engine.requests) == 2)
    if stream and tokens:
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
    connection.close()
    engine.wait_for(lambda: len(engine.aborted) == 2)
    assert sorted(engine.aborted) == sorted(request.request_id for request in engine.requests)
    server.wait_idle()
    assert "aborted cmpl-" in caplog.text


def test_a_client_that_leaves_while_it_sends(server: RunningServer) -> None:
    connection = server.raw_post(PATH, {"prompt": "hello"})
    connection.close()
    half = socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S)
    half.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n{")
    half.close()
    assert server.http.get("/version").status_code == 200


def test_drain_finishes_what_was_admitted(
    start: Callable[..., RunningServer], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pypto_serving.api")
    server = start()
    server.engine.script = lambda request: Script([], hang=True)
    answers = []
    client = threading.Thread(target=lambda: answers.append(server.post(PATH, {"prompt": "hello"})))
    client.start()
    server.engine.wait_for(lambda: len(server.engine.requests) == 1)
    server.call(server.server.stop)
    server.engine.refusal = QueueFullError("full, too", 1)
    refused = server.post(PATH, {"prompt": "hello"})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    health = server.http.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "draining")
    assert health.json()["detail"] == "shutting down, 1 request left"
    assert "draining: 1 request left, at most 5 s; stop again to end now" in caplog.messages
    server.call(server.engine.finish_hanging)
    client.join(WAIT_S)
    server.thread.join(WAIT_S)
    assert answers[0].status_code == 200
    assert not server.thread.is_alive()


@pytest.mark.parametrize(("drain_timeout_s", "stops"), [(1000.0, 2), (0.01, 1)])
@pytest.mark.parametrize("stream", [False, True])
def test_who_waits_when_the_server_ends_is_told(
    start: Callable[..., RunningServer],
    caplog: pytest.LogCaptureFixture,
    drain_timeout_s: float,
    stops: int,
    stream: bool,
) -> None:
    """A second stop ends at once, and so does the first after the drain time."""
    server = start(drain_timeout_s=drain_timeout_s)
    server.engine.script = lambda request: Script([5] if stream else [], hang=True)
    answers = []
    body = {"prompt": "hello", "stream": stream}
    client = threading.Thread(target=lambda: answers.append(server.post(PATH, body)))
    client.start()
    server.engine.wait_for(lambda: server.engine.played == 1)
    for _ in range(stops):
        server.call(server.server.stop)
    client.join(WAIT_S)
    server.thread.join(WAIT_S)
    assert not server.thread.is_alive()
    assert answers[0].status_code == (200 if stream else 503)
    assert answers[0].text.count("the server is shutting down") == 1
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_a_drain_that_times_out_counts_every_choice(
    start: Callable[..., RunningServer], caplog: pytest.LogCaptureFixture, n: int, stream: bool
) -> None:
    caplog.set_level("INFO", "pypto_serving.api")
    server = start(drain_timeout_s=0.01)
    server.engine.script = lambda request: Script([5], hang=True)
    body = {"prompt": "hello", "stream": stream, "n": n}
    client = threading.Thread(target=lambda: server.post(PATH, body))
    client.start()
    server.engine.wait_for(lambda: server.engine.played == 1)
    server.call(server.server.stop)
    client.join(WAIT_S)
    server.thread.join(WAIT_S)
    (line,) = [message for message in caplog.messages if message.startswith("aborted ")]
    counts = "1 unfinished choice after 1 output token" if n == 1 else "3 unfinished choices after 3 output tokens"
    assert line.endswith(f": {counts}")
    assert "ending after 0.01 s, with a 503 for 1 request that did not finish" in caplog.messages
    assert (
        f'finished_reason="error",model_name="{server.service.model_name}"}} {n}.0'
        in server.service.metrics.render().decode()
    )


PROGRAM = """
import asyncio, sys
from pathlib import Path
from pypto_serving.api.run import serve
from pypto_serving.api.server import create_app
from pypto_serving.api.settings import load_serving_config
from pypto_serving.types.config import ServerConfig
from tests.api.scripted_engine import Script, ScriptedEngine, engine_config
engine = ScriptedEngine(engine_config(400), lambda request: Script([5]))
app = create_app(engine, load_serving_config(sys.argv[1]))
server = ServerConfig(served_model_names=("a",), port=0)
asyncio.run(serve(app, server, lambda port: print(port, flush=True)))
print("done", "torch" in sys.modules)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_cleanly(checkpoint: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", PROGRAM, str(checkpoint)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        socket.create_connection(("127.0.0.1", port), timeout=WAIT_S).close()
        process.send_signal(number)
        assert process.stdout.read() == "done False\n"
    assert process.returncode == 0


def test_an_address_in_use_is_an_os_error() -> None:
    with bind("127.0.0.1", 0) as taken, pytest.raises(OSError, match="in use"):
        taken.listen()
        bind("127.0.0.1", taken.getsockname()[1])


def test_serving_config_refuses_what_cannot_work() -> None:
    with pytest.raises(ConfigError, match="name is empty"):
        ServingConfig(model_dir="x", served_model_names=())
    with pytest.raises(ConfigError, match="API key is empty"):
        ServingConfig(model_dir="x", served_model_names=("a",), api_keys=(" ",))
    assert "secret" not in repr(ServingConfig(model_dir="x", served_model_names=("a",), api_keys=("secret",)))


def test_default_sampling(tmp_path: Path) -> None:
    def load(values: dict[str, object]) -> DefaultSampling:
        (tmp_path / "generation_config.json").write_text(json.dumps(values))
        return default_sampling(read_generation_config(tmp_path))

    assert default_sampling(read_generation_config(tmp_path)) == DefaultSampling()
    assert load({"do_sample": False, "temperature": 0.7}).temperature == 0
    lacking = load({"repetition_penalty": 1.05, "top_k": 20, "typical_p": 1.0, "num_beams": 4})
    assert lacking.repetition_penalty == 1.05 and lacking.not_applied == {"num_beams": 4}
    assert "top_k 20" in lacking.describe() and "repetition_penalty 1.05" in lacking.describe()
    assert "not applied: num_beams 4" in lacking.describe()
    assert (
        load({"max_new_tokens": 9}).max_tokens == 9
        and "max_tokens 9 in chats" in load({"max_new_tokens": 9}).describe()
    )
    wrong = [{"max_new_tokens": value} for value in (0, True, 1.5, "9")]
    for bad in ({"top_p": 7}, {"temperature": "hot"}, {"top_k": 1.5}, {"repetition_penalty": 0}, *wrong):
        with pytest.raises(ModelError, match=r"generation_config\.json: (top_p|temperature|top_k|rep|max_new_tokens)"):
            load(bad)


def test_websockets_find_nothing(server: RunningServer) -> None:
    scope = {"type": "websocket", "path": "/v1/models", "headers": [], "query_string": b"", "subprotocols": []}
    sent: list[dict[str, object]] = []

    async def receive() -> dict[str, object]:
        return {"type": "websocket.connect"}

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    asyncio.run(server.app(scope, receive, send))  # type: ignore[arg-type]
    assert sent[0]["type"] == "websocket.close"


def test_the_prefix_cache_is_reset_by_tier(server: RunningServer) -> None:
    assert server.post("/reset_prefix_cache", {}).status_code == 200
    assert server.post("/reset_prefix_cache?tier=device&tier=disk", {}).status_code == 200
    assert server.engine.cleared == [("device", "host", "disk", "remote"), ("device", "disk")]
    answer = server.post("/reset_prefix_cache?tier=tape", {})
    assert answer.status_code == 400 and "tape" in answer.text
