"""`serve`, `generate` and `chat` as real processes over the null backend."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import IO, Any

import httpx
import psutil
import pytest

from pypto_serving.cli.serve import where
from pypto_serving.setup.locate import BUNDLED
from pypto_serving.types.config import ServerConfig

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
PYPTO = [sys.executable, "-m", "pypto_serving"]
NULL = ["--backend", "null", "--kv-memory", "1GiB"]


def run(*argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PYPTO, *argv], input=stdin, capture_output=True, text=True, cwd=ROOT, timeout=120)


@contextmanager
def serving(
    *argv: str, stderr: int | IO[str] = subprocess.PIPE
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A server process and its ready line; killed afterwards if it still runs."""
    command = [*PYPTO, "serve", *argv, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=ROOT)
    assert process.stdout is not None
    try:
        yield process, json.loads(process.stdout.readline() or "{}")
    finally:
        process.kill()
        process.communicate()


def get(port: int, path: str, **headers: str) -> tuple[int, Any]:
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, json.loads(body)


def test_serve_announces_itself_in_one_line_and_drains() -> None:
    with serving(*NULL, "--served-model-name", "a", "--served-model-name", "b") as (process, ready):
        assert ready["event"] == "ready"
        assert ready["url"] == f"http://127.0.0.1:{ready['port']}"
        assert (ready["pid"], ready["model"]) == (process.pid, ["a", "b"])
        assert 0 < ready["ready_s"] < 60
        assert get(ready["port"], "/health")[0] == 200
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out) == (0, "")
        assert re.search(r"api: stopped after \d+ s\n$", err)
        shown = err.splitlines()[:10]
        assert shown[0].startswith("pypto-serving ") and any(line.startswith("  reasons ") for line in shown)
        assert re.search(r"\n  given +port 0, kv-memory \S+ MiB, backend null\n", err)
        assert re.search(r"\n  decided +chat-template off \(this model has no tokenizer.json\), dtype ", err)
        assert re.search(r"\n  device KV +kv \S+ MiB\n  memory .* = ", err)


def test_a_full_disk_below_the_log_stops_nothing() -> None:
    with Path("/dev/full").open("w") as full, serving(*NULL, "--access-log", stderr=full) as (process, ready):
        assert [get(ready["port"], "/health")[0] for _ in range(2)] == [200, 200]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.mark.parametrize(
    ("newest", "number"),
    [
        ("serve", signal.SIGINT),
        pytest.param("pypto_serving.engine", signal.SIGTERM, marks=pytest.mark.soak),
        ("pypto_serving.worker", signal.SIGINT),
    ],
)
def test_a_server_that_is_stopped_early_ends_in_silence(newest: str, number: signal.Signals) -> None:
    """As by Ctrl-C in a terminal: the signal reaches all processes, the newest of which still imports its modules."""
    command = [*PYPTO, "serve", *NULL, "--port", "0"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, **pipes, cwd=ROOT, start_new_session=True) as process:
        assert process.stdout is not None and "pypto-serving " in process.stdout.readline()
        server = psutil.Process(process.pid)
        while not any(newest in child.cmdline() for child in (server, *server.children(recursive=True))):
            time.sleep(0.005)
        os.killpg(process.pid, number)
        said, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "Traceback" not in said and "ERROR" not in said


def test_an_api_key_guards_all_but_health() -> None:
    with serving(*NULL, "--api-key", "secret") as (_, ready):
        assert get(ready["port"], "/health")[0] == 200
        assert [get(ready["port"], path)[0] for path in ("/v1/models", "/metrics")] == [401, 401]
        assert get(ready["port"], "/v1/models", Authorization="Bearer secret")[0] == 200


def test_a_hangup_reads_the_keys_again(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("old\n")
    with serving(*NULL, "--api-key-file", str(keys)) as (process, ready):
        assert get(ready["port"], "/v1/models", Authorization="Bearer old")[0] == 200
        keys.write_text("new\nnext\n")
        process.send_signal(signal.SIGHUP)
        while get(ready["port"], "/v1/models", Authorization="Bearer next")[0] == 401:
            pass
        assert get(ready["port"], "/v1/models", Authorization="Bearer old")[0] == 401
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_signals_at_the_wrong_time_change_nothing(tmp_path: Path) -> None:
    """A hangup before it serves waits until then; what comes while it ends is late."""
    keys = tmp_path / "keys"
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    keys.write_text("old\n")
    command = [*PYPTO, "serve", *NULL, "--port", "0", "--api-key-file", str(keys)]
    with subprocess.Popen(command, **pipes, cwd=ROOT, start_new_session=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert "pypto-serving " in process.stderr.readline()
        keys.write_text("new\n")
        os.killpg(process.pid, signal.SIGHUP)
        ready = json.loads(process.stdout.readline())
        assert get(ready["port"], "/v1/models", Authorization="Bearer new")[0] == 200
        family = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGHUP)
        while process.poll() is None:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                process.send_signal(number)
                time.sleep(0.01)
        said = process.stderr.read()
    assert process.returncode == 0
    assert "Traceback" not in said and said.count("worker 1 started") == 1 and "worker 2" not in said
    assert psutil.wait_procs(family, 5)[1] == []


def test_an_interrupt_before_a_command_runs_ends_in_silence() -> None:
    code = (
        "import importlib.abc, os, signal, sys\n"
        "class Interrupts(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'typer': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "from pypto_serving.__main__ import main\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_a_cache_salt_parts_what_is_cached() -> None:
    with serving(*NULL) as (_, ready), httpx.Client(base_url=ready["url"]) as http:

        def cached(**more: str) -> int:
            body = {"prompt": list(range(100)), "max_tokens": 2, **more}
            usage = http.post("/v1/completions", json=body).raise_for_status().json()["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert [cached(), cached(), cached(cache_salt="a"), cached(cache_salt="a")] == [0, 96, 0, 96]
        assert [cached(cache_salt="b"), cached()] == [0, 96]


def test_a_timeout_ends_a_request_and_frees_its_blocks() -> None:
    with serving(str(BUNDLED), *NULL) as (_, ready), httpx.Client(base_url=ready["url"], timeout=60) as http:

        def used() -> float:
            found = re.search(r"^vllm:kv_cache_usage_perc{.*} (.*)$", http.get("/metrics").text, re.MULTILINE)
            assert found is not None
            return float(found[1])

        slow = {"prompt": [5], "max_tokens": 2000, "ignore_eos": True, "n": 64}
        for more, headers in (({"timeout": 0.3}, {}), ({"timeout": 60}, {"X-Request-Timeout": "0.3"})):
            answer = http.post("/v1/completions", json={**slow, **more}, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
            assert answer.headers["x-should-retry"] == "false" and "retry-after" not in answer.headers
            events = http.post("/v1/completions", json={**slow, **more, "stream": True}, headers=headers).text
            assert '"code":"deadline_exceeded"' in events.split("\n\n")[-2 - events.endswith("[DONE]\n\n")]
        while used():
            pass
        assert http.post("/v1/completions", json={"prompt": [5], "max_tokens": 3, "timeout": 60}).status_code == 200


def test_a_lower_priority_goes_first() -> None:
    options, many = [str(BUNDLED), *NULL, "--max-num-seqs", "1"], {"n": 128, "max_tokens": 400}
    with serving(*options) as (_, ready), httpx.Client(base_url=ready["url"], timeout=60) as http:
        order: list[int] = []

        @contextmanager
        def asked(priority: int, **more: int) -> Iterator[httpx.Response]:
            body = {"prompt": [5], "max_tokens": 50, "ignore_eos": True, "stream": True, "priority": priority, **more}
            with http.stream("POST", "/v1/completions", json=body) as response:
                yield response.raise_for_status()

        def ask(priority: int) -> None:
            with asked(priority) as response:
                lines = response.iter_lines()
                next(lines)
                order.append(priority)
                list(lines)

        def known() -> float:
            """Requests that run, wait or have ended."""
            names = "vllm:num_requests_running|vllm:num_requests_waiting|vllm:request_success_total"
            return sum(map(float, re.findall(rf"^(?:{names}){{.*}} (.*)$", http.get("/metrics").text, re.MULTILINE)))

        with ThreadPoolExecutor() as threads, asked(-9, **many):
            done = [threads.submit(ask, priority) for priority in (1, 0, -1)]
            while known() < many["n"] + len(done):
                pass
        for one in done:
            one.result()
    assert order == [-1, 0, 1]


def test_a_taken_port_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run("serve", *NULL, "--port", str(port))
        is_open = run("serve", *NULL, "--port", str(port), "--host", "0.0.0.0")
    assert re.match(r"[0-9:]+ WARNING api: --host is 0.0.0.0 and there is no API key", is_open.stderr)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        f"error: --port {port} on 127.0.0.1 cannot be used: address already in use; give another, or 0 for a free one\n"
    )


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:1"), ("0.0.0.0", "http://127.0.0.1:1"), ("::", "http://[::1]:1")],
)
def test_server_url(host: str, url: str) -> None:
    server = ServerConfig(served_model_names=("a",), host=host)
    assert where(server, 1) == {"url": url, "port": 1}


def test_generate_prints_one_result_per_prompt() -> None:
    options = ["generate", *NULL, "--model", str(BUNDLED), "--max-tokens", "4", "--json"]
    piped = run(*options, stdin="one\n\ntwo\n")
    assert piped.returncode == 0, piped.stderr
    results = [json.loads(line) for line in piped.stdout.splitlines()]
    assert [r["prompt"] for r in results] == ["one", "two"]
    assert all(r["output_tokens"] == 4 and r["finish_reason"] == "length" for r in results)
    given = run(*options, "two")
    assert json.loads(given.stdout) == results[1]


def test_chat_answers_lines_of_a_pipe() -> None:
    result = run("chat", str(BUNDLED), *NULL, "--max-tokens", "4", stdin="hello\n/clear\nhello\n/exit\nnever\n")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert len(result.stdout) > 2


def test_chat_with_a_running_server() -> None:
    with serving(str(BUNDLED), *NULL) as (_, ready):
        talk = ["--max-tokens", "4", "--temperature", "0"]
        remote = run("chat", "--url", ready["url"], *talk, stdin="hello\n")
        assert remote.returncode == 0, remote.stderr
        assert remote.stdout == run("chat", str(BUNDLED), *NULL, *talk, stdin="hello\n").stdout


def test_a_terminal_gets_a_sentence_and_a_stop_is_logged() -> None:
    ours, theirs = pty.openpty()
    command = [*PYPTO, "serve", *NULL, "--port", "0"]
    process = subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        os.close(theirs)
        with os.fdopen(ours, encoding="utf-8", errors="replace") as terminal:
            line = terminal.readline()
        assert re.fullmatch(r"ready after [0-9.]+ s: plain at http://127\.0\.0\.1:[0-9]+; Ctrl-C stops\s*", line), line
        family = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
        names = {Path(f"/proc/{pid}/comm").read_text().strip() for pid in family}
        assert {"pypto-serve", "pypto-core", "pypto-worker"} <= names
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=30)[1]
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0 and re.search(r"INFO api: stopped after [0-9]+ s\n$", said), said
