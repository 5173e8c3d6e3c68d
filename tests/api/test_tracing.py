"""Traces: what reaches a collector of the OpenTelemetry protocol."""

from __future__ import annotations

import gc
import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.api.running import CHAT, COMPLETIONS, RunningServer
from tests.api.scripted_engine import Script

pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel (pip install '.[otel]')")
pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="needs the extra otel (pip install '.[otel]')")

from opentelemetry.sdk.trace import ReadableSpan

from pypto_serving.api.http.tracing import CLOSE_S, MAX_CHILDREN, Complaints, Tracing, open_tracing
from pypto_serving.errors import ConfigError
from pypto_serving.types.request import RequestFault
from tests.collector import Collector, attributes_of

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CLIENT = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine-7"}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with Collector() as running:
        yield running


def requests(spans: list[Any]) -> list[Any]:
    return [span for span in spans if span.name == "llm_request"]


def test_a_request_continues_the_trace_of_its_client(collector: Collector, start: Callable[..., RunningServer]) -> None:
    server = start(otlp_traces_endpoint=collector.grpc_url)
    body = {"prompt": "hello", "max_tokens": 5, "temperature": 0.5}
    answer = server.http.post(COMPLETIONS, json=body, headers=CLIENT).json()
    spans = collector.wait_for(requests)
    (request,) = requests(spans)
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, PARENT)
    assert (request.kind, request.status.code) == (request.SPAN_KIND_SERVER, request.status.STATUS_CODE_UNSET)
    children = {span.name: span for span in spans if span is not request}
    assert set(children) == {"queue", "prefill", "decode"}
    assert {child.parent_span_id for child in children.values()} == {request.span_id}
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    in_order = [children[name] for name in ("queue", "prefill", "decode")]
    for before, after in pairwise(in_order):
        assert before.start_time_unix_nano <= before.end_time_unix_nano == after.start_time_unix_nano
    assert abs(request.end_time_unix_nano - time.time_ns()) < 60e9
    found, usage = attributes_of(request), answer["usage"]
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.id": "mine-7",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.n": 1,
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.prompt_tokens": usage["prompt_tokens"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.completion_tokens": usage["completion_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "http.response.status_code": 200,
    }
    assert {name: found[name] for name in expected} == expected
    latency = {name: found[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_to_first_token", "e2e")}
    assert latency["time_in_queue"] <= latency["time_to_first_token"] <= latency["e2e"]
    assert "hello" not in str(spans)
    assert collector.resource["service.name"] == "pypto-serving"


def test_the_sdks_variables_choose_protocol_and_service(
    collector: Collector, start: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    server = start(otlp_traces_endpoint=collector.http_url)
    body = {"messages": [{"role": "user", "content": "hello"}], "stream": True, "max_tokens": 3, "n": 2}
    assert server.post(CHAT, body).status_code == 200
    spans = collector.wait_for(requests)
    assert set(collector.paths) == {"/v1/traces"}
    assert collector.resource["service.name"] == "mine"
    assert attributes_of(requests(spans)[0])["gen_ai.operation.name"] == "chat"
    assert sorted(attributes_of(span)["gen_ai.choice.index"] for span in spans if span.name == "decode") == [0, 1]


def test_what_is_not_sampled_is_not_traced(collector: Collector, start: Callable[..., RunningServer]) -> None:
    server = start(otlp_traces_endpoint=collector.grpc_url)
    body = {"prompt": "hello", "max_tokens": 1}
    unsampled = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    assert server.http.post(COMPLETIONS, json=body, headers=unsampled).status_code == 200
    assert server.http.get("/health").status_code == 200
    assert server.post(COMPLETIONS, body).status_code == 200
    (request,) = requests(collector.wait_for(requests))
    assert request.trace_id.hex() != TRACE and not request.parent_span_id


def test_responses_are_traced(collector: Collector, start: Callable[..., RunningServer]) -> None:
    server = start(otlp_traces_endpoint=collector.grpc_url)
    answer = server.http.post("/v1/responses", json={"input": "hello", "max_output_tokens": 2}).json()
    (request,) = requests(collector.wait_for(requests))
    found = attributes_of(request)
    assert (found["gen_ai.operation.name"], found["gen_ai.response.id"]) == ("chat", answer["id"])


def test_requests_of_batches_are_traced(
    collector: Collector, start: Callable[..., RunningServer], tmp_path: Path
) -> None:
    """Each has a span of its own, which ends with its answer."""
    server = start(otlp_traces_endpoint=collector.grpc_url, batch_dir=str(tmp_path))
    client, asked = server.openai(), {"prompt": "hello", "max_tokens": 2}
    lines = [{"custom_id": f"{i}", "url": COMPLETIONS, "body": asked | {"n": i}} for i in range(3)]
    file = client.files.create(file=("in.jsonl", b"\n".join(map(msgspec.json.encode, lines))), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    kept = server.app.state.batches.store(server.app.state.clients.name(b""))
    server.wait_for(lambda: kept.batch(batch.id).status == "completed")
    output = client.files.content(str(client.batches.retrieve(batch.id).output_file_id)).content
    answers = [msgspec.json.decode(line)["response"] for line in output.splitlines()]
    spans = requests(collector.wait_for(lambda spans: len(requests(spans)) == 3))
    found = {str(attributes_of(span)["gen_ai.request.id"]): attributes_of(span) for span in spans}
    assert {name: one["http.response.status_code"] for name, one in found.items()} == {
        answer["request_id"]: answer["status_code"] for answer in answers
    }
    assert sorted(one["http.response.status_code"] for one in found.values()) == [200, 200, 400]
    assert len({span.trace_id for span in spans}) == 3


def test_failures_are_errors_and_refusals_are_not(collector: Collector, start: Callable[..., RunningServer]) -> None:
    server = start(otlp_traces_endpoint=collector.grpc_url)
    assert server.http.post(COMPLETIONS, json={"prompt": ""}).status_code == 400
    server.engine.script = lambda request: Script([], fault=RequestFault(500, "request_failed", "it failed"))
    assert server.http.post(COMPLETIONS, json={"prompt": "hello", "stream": True}).status_code == 200
    spans = collector.wait_for(lambda spans: len(requests(spans)) == 2)
    refused, failed = requests(spans)
    assert attributes_of(refused)["http.response.status_code"] == 400
    assert refused.status.code == refused.status.STATUS_CODE_UNSET
    assert (failed.status.code, failed.status.message) == (failed.status.STATUS_CODE_ERROR, "it failed")
    assert attributes_of(failed)["error.type"] == "request_failed"


def test_a_request_has_a_bounded_number_of_spans(collector: Collector, start: Callable[..., RunningServer]) -> None:
    server = start(otlp_traces_endpoint=collector.grpc_url)
    assert server.post(COMPLETIONS, {"prompt": "hello", "max_tokens": 1, "n": 64}).status_code == 200
    spans = collector.wait_for(requests)
    assert 3 < len(spans) <= 1 + MAX_CHILDREN
    assert len(attributes_of(requests(spans)[0])["gen_ai.response.finish_reasons"]) == 64


def num_spans_of(request_id: str) -> int:
    """Spans in memory whose request had this id."""
    spans = [each for each in gc.get_objects() if isinstance(each, ReadableSpan)]
    return sum((span.attributes or {}).get("gen_ai.request.id") == request_id for span in spans)


@pytest.mark.parametrize("protocol", [pytest.param("grpc", marks=pytest.mark.soak), "http/protobuf"])
def test_a_collector_that_is_gone_holds_up_nothing(
    protocol: str,
    start: Callable[..., RunningServer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its queue is full at once; the server answers, and ends in time."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:  # takes connections, says nothing
        server = start(otlp_traces_endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}")
        for _ in range(40):
            body, name = {"prompt": "hello", "max_tokens": 1}, {"x-request-id": protocol}
            assert server.http.post(COMPLETIONS, json=body, headers=name).status_code == 200
        server.wait_idle()
        assert num_spans_of(protocol) <= 2 * (8 + 4)  # of 160; some may just be dropped
        began_s = time.monotonic()
        server.stop()
        assert time.monotonic() - began_s < CLOSE_S + 20


def test_the_exporters_complaints_are_said_rarely(caplog: pytest.LogCaptureFixture) -> None:
    complaining = logging.getLogger("tests.complaining")
    complaining.addHandler(Complaints("http://127.0.0.1:9"))
    for _ in range(3):
        complaining.error("%s is\ngone", "it")
    beginning = "traces for http://127.0.0.1:9: "  # the exporter of an earlier test may still complain
    said = [record.message for record in caplog.records if record.message.startswith(beginning)]
    assert said == [beginning + "it is gone (said at most every 60 s)"]


def test_no_header_takes_the_place_of_a_complaint(
    collector: Collector, start: Callable[..., RunningServer], caplog: pytest.LogCaptureFixture
) -> None:
    """A client that sends one now and then would hide that the collector is gone."""
    server = start(otlp_traces_endpoint=collector.grpc_url)
    states = ["EVIL=\x9b31m", "a=b,a=c", ",".join(f"k{i}=v" for i in range(40)), "a=b" + " " * 5000 + "x"]
    headers: list[dict[str, Any]] = [{**CLIENT, "tracestate": state.encode("latin-1")} for state in states]
    for each in [*headers, {"traceparent": "x" * 600}]:
        assert server.http.post(COMPLETIONS, json={"prompt": "hello", "max_tokens": 1}, headers=each).is_success
    spans = collector.wait_for(lambda spans: len(requests(spans)) == len(headers) + 1)
    assert [span.trace_id.hex() == TRACE for span in requests(spans)] == [True] * len(headers) + [False]
    complaints = [record.message for record in caplog.records if "traces for" in record.message]
    assert not [said for said in complaints if "Transient error" not in said], "only of an earlier test's exporter"


def test_an_unknown_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(Exception, match="OTEL_EXPORTER_OTLP_PROTOCOL is 'http/json', but must be grpc or http/proto"):
        Tracing("http://127.0.0.1:4318")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_BSP_MAX_QUEUE_SIZE", "-1"),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "x"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "x"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip"),
    ],
)
def test_a_variable_that_the_sdk_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"OTEL_\* variables: "):
        open_tracing("http://127.0.0.1:4317")
