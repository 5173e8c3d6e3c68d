"""A server as its operators see it: its log is JSON, lines of a request name it, and traces have its phases."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import Server

pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="needs the extra otel (pip install '.[otel]')")

from tests.collector import Collector, attributes_of

pytestmark = pytest.mark.e2e

MEMORY = ("--kv-memory", "2.5MiB", "--max-model-len", "1200", "--kv-host-memory", "64MiB")
LOGS = ("--log-format", "json", "--access-log", "--enable-log-requests")


def complete(server: Server, name: str, prompt: list[int]) -> Any:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = server.http.post("/v1/completions", json=body, headers={"x-request-id": name})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-request-id"] == name
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]


def test_logs_and_traces_follow_requests(tmp_path: Path) -> None:
    """A prompt is computed, displaced by others, and comes back from host memory."""
    rng, written = random.Random(1), tmp_path / "log"
    prompt = rng.choices(range(32, 127), k=400)
    program = ("sh", "-c", f'exec {sys.executable} -m pypto_serving "$@" 2>{written}', "sh")
    with Collector() as collector:
        traces = ("--otlp-traces-endpoint", collector.grpc_url)
        with Server(*MEMORY, *LOGS, *traces, program=program) as server:
            complete(server, "first", prompt)
            for i in range(3):
                complete(server, f"other-{i}", rng.choices(range(32, 127), k=1000))
            assert complete(server, "again", prompt)["host"] == 384
        spans = collector.spans  # the end of the server sent the last ones
    lines = [json.loads(line) for line in written.read_text().splitlines()]
    assert all({"time", "level", "process", "message"} <= line.keys() for line in lines)
    assert {"api", "core"} <= {line["process"] for line in lines}
    of_first = [line for line in lines if line.get("request_id") == "first"]
    assert [line.get("status", line.get("finish_reasons")) for line in of_first] == [{"length": 1}, 200]
    assert any("settings" in line for line in lines)
    (plan,) = (line["memory"] for line in lines if line["message"] == "memory plan")
    assert [group["tier"] for group in plan["groups"]] == ["device", "host"] and plan["total_bytes"] > 64 << 20
    requests = {attributes_of(span)["gen_ai.request.id"]: span for span in spans if span.name == "llm_request"}
    assert len(requests) == 5
    phases = {
        name: {span.name: span for span in spans if span.parent_span_id == request.span_id}
        for name, request in requests.items()
    }
    assert set(phases["first"]) == {"queue", "prefill", "decode"}
    again, of_again = requests["again"], phases["again"]
    assert set(of_again) == {"queue", "load", "prefill", "decode"}
    queue, load = of_again["queue"], of_again["load"]
    assert again.start_time_unix_nano <= queue.start_time_unix_nano <= load.start_time_unix_nano
    assert load.start_time_unix_nano < load.end_time_unix_nano <= of_again["prefill"].start_time_unix_nano
    assert of_again["decode"].end_time_unix_nano <= again.end_time_unix_nano
    assert attributes_of(load)["pypto.cached_tokens.host"] == 384
