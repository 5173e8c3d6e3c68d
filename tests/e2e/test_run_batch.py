"""`run-batch` in a process of its own: it is killed midway and goes on, and no answer is computed twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from pypto_serving.api.batch.running import AnswerFile
from pypto_serving.cli import main
from tests.e2e.server import Server

pytestmark = pytest.mark.e2e
WAIT_S = 120.0


def write_requests(path: Path, count: int, **body: Any) -> Path:
    asked = [
        {
            "custom_id": f"request {i}",
            "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": f"What is {i}+4?"}], "seed": i, **body},
        }
        for i in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, asked)))
    return path


def start(source: Path, target: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pypto_serving", "run-batch", "-i", str(source), "-o", str(target), *options]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def finish(source: Path, target: Path, *options: str) -> tuple[int, str]:
    process = start(source, target, *options)
    _, said = process.communicate(timeout=WAIT_S)
    return process.returncode, said


def refused(capsys: pytest.CaptureFixture[str], source: Path, target: Path, *options: str) -> tuple[int, str]:
    """The exit code and stderr of a run that computes nothing, in this process."""
    return main(["run-batch", "-i", str(source), "-o", str(target), *options]), capsys.readouterr().err


def texts(target: Path) -> dict[str, str]:
    lines = [json.loads(line) for line in target.read_bytes().splitlines()]
    found = {one["custom_id"]: one["response"]["body"]["choices"][0]["message"]["content"] for one in lines}
    assert len(found) == len(lines)
    return found


def test_a_run_that_was_killed_goes_on(tmp_path: Path) -> None:
    source = write_requests(tmp_path / "in.jsonl", 24, max_tokens=200, ignore_eos=True)
    target, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    process = start(source, target, "--max-num-seqs", "2")
    family = [psutil.Process(process.pid)]
    deadline_s = time.monotonic() + WAIT_S
    while not target.exists() or target.read_bytes().count(b"\n") < 3:
        assert process.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.01)
    family += family[0].children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    psutil.wait_procs(family, WAIT_S)
    before = target.read_bytes()
    assert before.endswith(b"\n") and before.count(b"\n") < 24
    target.write_bytes(before + b'{"id":"batch_req_torn","custom_id":"request 3')
    code, said = finish(source, target)
    assert code == 0, said
    after = target.read_bytes()
    assert after.startswith(before)
    left = 24 - before.count(b"\n")
    assert said == f"answered {left} requests, 0 of 24 with an error\n"
    assert finish(source, whole)[0] == 0
    assert texts(target) == texts(whole)


def test_a_batch_outlives_its_server(tmp_path: Path) -> None:
    source = write_requests(tmp_path / "in.jsonl", 24, max_tokens=200, ignore_eos=True)
    options = ("--batch-dir", tmp_path / "kept", "--max-num-seqs", "4")
    with Server(*options) as first:
        client = openai.OpenAI(base_url=f"{first.url}/v1", api_key="none", max_retries=0)
        file = client.files.create(file=source, purpose="batch")
        endpoint: Any = "/v1/chat/completions"
        batch = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
        while (counts := client.batches.retrieve(batch.id).request_counts) is None or counts.completed < 3:
            time.sleep(0.01)
        assert counts.completed < 24
        first.stop(signal.SIGKILL)
    begun = [path.read_bytes() for path in (tmp_path / "kept").glob("*/file-*.jsonl") if file.id not in path.name]
    before = begun[0].rpartition(b"\n")[0]
    assert before.count(b"\n") >= 2
    with Server(*options) as second:
        client = openai.OpenAI(base_url=f"{second.url}/v1", api_key="none", max_retries=0)
        while (found := client.batches.retrieve(batch.id)).status != "completed":
            time.sleep(0.01)
        assert found.output_file_id is not None and found.request_counts is not None
        assert (found.request_counts.completed, found.request_counts.failed) == (24, 0)
        answered = client.files.content(found.output_file_id).content
    target = tmp_path / "out.jsonl"
    target.write_bytes(answered)
    assert answered.startswith(before) and len(texts(target)) == 24


def test_files_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write_requests(tmp_path / "in.jsonl", 1)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"custom_id": "a"}\n')
    for source, target, words in (
        (tmp_path / "none", tmp_path / "out", "none cannot be read"),
        (bad, tmp_path / "out", "line 1: this is not a request"),
        (good, good, "has lines that are not answers"),
        (good, tmp_path / "no" / "out", "cannot be written"),
    ):
        code, said = refused(capsys, source, target)
        assert code == 2 and words in said, said
    assert good.read_text().startswith("{")


def test_pipes_and_devices_are_no_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = write_requests(tmp_path / "in.jsonl", 1), tmp_path / "out.jsonl"
    os.mkfifo(tmp_path / "pipe")
    options = ("--backend", "null")
    for paths, named in (
        ((tmp_path / "pipe", target), f"--input-file {tmp_path / 'pipe'}"),
        ((source, Path("/dev/full")), "--output-file /dev/full"),
    ):
        code, said = refused(capsys, *paths, *options)
        assert (code, said) == (2, f"error: {named} is a pipe or a device, but must be a file; give another\n")


def test_an_output_has_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = write_requests(tmp_path / "in.jsonl", 1), tmp_path / "out.jsonl"
    output = AnswerFile(target)
    try:
        code, said = refused(capsys, source, target, "--backend", "null")
        assert (code, said) == (2, f"error: --output-file {target} is written by another run; wait for its end\n")
    finally:
        output.close()


def test_the_address_of_a_server_is_free_for_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, said = refused(capsys, tmp_path / "none", tmp_path / "out", "--kv-events", "tcp://127.0.0.1:8000")
    assert "none cannot be read" in said


def test_requests_are_traced(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="needs the extra otel")
    from tests.collector import Collector, attributes_of

    source, target = write_requests(tmp_path / "in.jsonl", 2, max_tokens=3), tmp_path / "out.jsonl"
    with Collector() as collector:
        code, said = finish(source, target, "--otlp-traces-endpoint", collector.grpc_url)
        assert code == 0, said
        spans = [span for span in collector.spans if span.name == "llm_request"]
    ids = {json.loads(line)["response"]["request_id"] for line in target.read_bytes().splitlines()}
    assert {attributes_of(span)["gen_ai.request.id"] for span in spans} == ids and len(spans) == 2


def test_answers_that_are_errors_are_told_by_the_exit_code(tmp_path: Path) -> None:
    asked = [
        {"custom_id": str(i), "url": "/v1/completions", "body": {"prompt": prompt, "max_tokens": 2}}
        for i, prompt in enumerate(([1, 2, 3], [4, 5], [10**9]))
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(map(json.dumps, asked)))
    code, said = finish(source, tmp_path / "out.jsonl", "--backend", "null")
    assert (code, said) == (1, "answered 3 requests, 1 of 3 with an error\n")
