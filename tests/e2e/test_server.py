"""The server as its users meet it: start, answers, health, faults, overload, disconnects, stop."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from pypto_serving.cli import main
from pypto_serving.errors import EXIT_ENGINE, EXIT_MODEL, EXIT_OK
from tests.e2e.server import Server

pytestmark = pytest.mark.e2e

QUESTION = [{"role": "user", "content": "What is 37+45?"}]


@pytest.fixture
def server(bundled_server: Server) -> Server:
    return bundled_server


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_chat_streamed_and_not(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    whole = client.chat.completions.create(model=model, messages=QUESTION, temperature=0)
    assert "82" in (whole.choices[0].message.content or "")
    assert whole.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_curl_as_in_the_readme(server: Server) -> None:
    command = ["curl", "-s", f"{server.url}/v1/chat/completions", "-H", "Content-Type: application/json"]
    command += ["-d", json.dumps({"messages": QUESTION})]
    reply = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert "82" in reply["choices"][0]["message"]["content"]


def test_completions_with_every_kind_of_prompt_and_n(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    for prompt, count in (("Hello", 1), (["Hello", "1+1="], 2), ([5, 6, 7], 1), ([[5, 6], [7]], 2)):
        reply = client.completions.create(
            model=model, prompt=prompt, max_tokens=4, n=2, extra_body={"ignore_eos": True}
        )
        assert len(reply.choices) == 2 * count
        assert reply.usage is not None and reply.usage.completion_tokens == 2 * count * 4


def test_seeded_sampling_repeats_and_choices_differ(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id

    def ask(seed: int) -> list[str]:
        reply = client.completions.create(
            model=model, prompt="Once", max_tokens=24, n=4, seed=seed, temperature=1.5, extra_body={"ignore_eos": True}
        )
        return [choice.text for choice in reply.choices]

    first = ask(1)
    assert ask(1) == first
    assert ask(2) != first
    assert len(set(first)) == 4


def test_cached_tokens_are_reported_and_change_nothing(server: Server) -> None:
    body = {"prompt": list(range(3, 203)), "max_tokens": 16, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    first, second = (server.http.post("/v1/completions", json=body).json() for _ in range(2))
    assert first["choices"] == second["choices"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 192
    assert server.metric("vllm:prefix_cache_hits_total") >= 192


def test_a_prompt_beyond_the_context_names_both_lengths(server: Server) -> None:
    limit = server.http.get("/v1/models").json()["data"][0]["max_model_len"]
    reply = server.http.post("/v1/completions", json={"prompt": [5] * (limit + 1), "max_tokens": 1})
    assert reply.status_code == 400
    assert str(limit) in reply.json()["error"]["message"] and str(limit + 1) in reply.json()["error"]["message"]


def test_a_client_killed_in_mid_stream_frees_its_blocks(server: Server) -> None:
    script = (
        "import httpx, sys\n"
        f"body = {{'prompt': [5] * 300, 'max_tokens': 3000, 'ignore_eos': True, 'stream': True}}\n"
        f"with httpx.stream('POST', '{server.url}/v1/completions', json=body, timeout=60) as reply:\n"
        "    for line in reply.iter_lines():\n"
        "        print(line, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None and reader.stdout.readline()
        assert server.metric("vllm:num_requests_running") == 1
        reader.kill()
    for _ in range(1000):
        if server.metric("vllm:num_requests_running") == 0:
            break
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert server.http.get("/health").status_code == 200


def test_a_killed_worker_changes_no_stream(server: Server) -> None:
    body = {"prompt": [9, 8, 7], "max_tokens": 400, "temperature": 0.9, "seed": 5, "ignore_eos": True, "stream": True}

    def text(kill: bool) -> str:
        parts = []
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    parts.append(json.loads(line[6:])["choices"][0]["text"])
                    if kill and len(parts) == 20:
                        server.worker().kill()
        return "".join(parts)

    undisturbed = text(kill=False)
    respawns = server.metric("pypto:worker_respawns_total")
    assert text(kill=True) == undisturbed
    assert server.metric("pypto:worker_respawns_total") == respawns + 1


def test_health_is_503_while_loading_and_while_no_worker_lives() -> None:
    with Server("--log-level", "warning", wait=False) as starting:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
        starting.wait_ready()
        assert starting.http.get("/health").status_code == 200
        worker = starting.worker()
        worker.kill()
        codes = set()
        while starting.http.get("/health").json().get("status") != "ready" or 503 not in codes:
            codes.add(starting.http.get("/health").status_code)
        assert starting.http.get("/health").status_code == 200
        assert starting.worker().pid != worker.pid
        assert starting.stop(signal.SIGINT, timeout_s=15) == EXIT_OK, "an idle server stops at once"


def test_overload_is_429_with_retry_after_and_drain_finishes_what_was_admitted() -> None:
    body = {"prompt": [[5]] * 2, "max_tokens": 500, "ignore_eos": True, "stream": True}
    with Server("--max-num-seqs", "1", "--max-queued-requests", "2") as small:
        with small.http.stream("POST", "/v1/completions", json=body) as running:
            lines = running.iter_lines()
            next(lines)
            reply = small.http.post("/v1/completions", json={"prompt": [[6]] * 2, "max_tokens": 5})
            assert reply.status_code == 429
            assert int(reply.headers["retry-after"]) >= 1
            os.kill(small.process.pid, signal.SIGTERM)
            assert "data: [DONE]" in list(lines)
        assert small.stop() == EXIT_OK


def test_a_killed_server_leaves_no_process() -> None:
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1, "user": "x" * 20_000}
    with Server() as victim:
        victim.http.post("/v1/chat/completions", json=chat).raise_for_status()
        family = victim.family()
        assert len(family) == 5  # API process, core, worker, reader and its copy
        victim.process.kill()
        victim.process.wait()
        _, alive = psutil.wait_procs(family, timeout=5)
        assert not alive


def one_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and "Traceback" not in text, text
    return lines[0]


def test_a_model_that_is_not_served_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    assert main(["serve", str(tmp_path)]) == EXIT_MODEL
    assert "MambaForCausalLM" in one_line(capsys.readouterr().err)


def test_a_checkpoint_that_breaks_while_loading_ends_the_server(tmp_path: Path) -> None:
    from tests.checkpoints import make_checkpoint

    model = make_checkpoint(tmp_path / "model", dtype="bfloat16")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    command = [sys.executable, "-m", "pypto_serving", "serve", str(model), "--port", "0"]
    failed = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert failed.returncode in (EXIT_MODEL, EXIT_ENGINE)
    assert "model.safetensors" in one_line(failed.stderr)
