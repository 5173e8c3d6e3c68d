"""After a known run, /metrics says what happened: ends by length, stop string and disconnect, choices, preemption."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pypto_serving.setup.locate import BUNDLED
from tests.deploy.vllm_dashboards import ABSENT, selectors, selects
from tests.e2e.server import Server
from tests.store.pool import wait_until

pytestmark = pytest.mark.e2e

OPTIONS = ("--backend", "null", "--max-model-len", "512", "--max-num-seqs", "8", "--log-level", "warning")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server whose KV cache is too small for eight long sequences."""
    with Server(BUNDLED, *OPTIONS, "--kv-memory", "1MiB") as running:
        yield running


def complete(server: Server, **body: Any) -> Any:
    answer = server.http.post("/v1/completions", json={"temperature": 0, "ignore_eos": True, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def scraped(server: Server) -> dict[str, float]:
    """Samples by name, with their labels appended, but for model and replica."""
    found = {}
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        for sample in family.samples:
            labels = [value for label, value in sorted(sample.labels.items()) if label not in ("model_name", "engine")]
            found[" ".join([sample.name, *labels])] = sample.value
    return found


def test_metrics_say_what_happened(server: Server) -> None:
    prompt = list(range(5, 75))
    whole = complete(server, prompt=prompt, max_tokens=20)
    text = whole["choices"][0]["text"]
    stopped = complete(server, prompt=prompt, max_tokens=20, stop=[text[len(text) // 2 :][:3]])
    assert stopped["choices"][0]["finish_reason"] == "stop"
    details = stopped["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == sum(details["cached_tokens_by_tier"].values()) == 64
    several = complete(server, prompt=prompt, max_tokens=5, n=3)
    with ThreadPoolExecutor(8) as threads:
        long = list(threads.map(lambda i: complete(server, prompt=[i] * 100, max_tokens=200), range(8)))
    body = {"prompt": prompt, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        next(response.iter_lines())

    def is_aborted() -> bool:
        found = scraped(server)
        return found["vllm:request_success_total abort"] > 0 and not found["vllm:num_requests_running"]

    wait_until(is_aborted)
    found = scraped(server)
    assert found["vllm:request_success_total length"] == 1 + 3 + 8
    assert found["vllm:request_success_total stop"] == 1
    assert found["vllm:request_success_total abort"] == 1
    answers = [whole, stopped, several, *long]
    output = sum(answer["usage"]["completion_tokens"] for answer in answers)
    for name in ("queue", "prefill", "decode", "inference"):
        assert found[f"vllm:request_{name}_time_seconds_count"] == 13, name
    assert found["vllm:e2e_request_latency_seconds_count"] == 13
    assert found["vllm:request_time_per_output_token_seconds_count"] == 13
    assert found["vllm:request_prompt_tokens_sum"] == 70 * 5 + 800
    assert found["vllm:request_generation_tokens_sum"] == output
    assert found["vllm:time_to_first_token_seconds_count"] == 14
    assert found["vllm:num_preemptions_total"] > 0
    assert found["vllm:iteration_tokens_total_count"] == found["pypto:engine_steps_total"]
    computed = found["vllm:prompt_tokens_total"] - found["vllm:prefix_cache_hits_total"]
    assert found["vllm:iteration_tokens_total_sum"] >= computed + output - 13
    assert found["vllm:generation_tokens_total"] >= output
    assert found["pypto:http_responses_total 200"] >= len(answers) + 1


def test_vllms_dashboards_have_data(server: Server) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        text = {"prompt": "a"} if path.endswith("/completions") else {"messages": [{"role": "user", "content": "a"}]}
        server.http.post(path, json=text | {"max_tokens": 3})
    server.http.get("/none")
    samples = [
        sample
        for family in text_string_to_metric_families(server.http.get("/metrics").text)
        for sample in family.samples
    ]
    for selector in selectors():
        assert any(selects(selector, sample.name, sample.labels) for sample in samples), selector
    assert not [sample.name for sample in samples if sample.name.startswith(tuple(f"vllm:{name}" for name in ABSENT))]


def test_http_requests_have_bounded_labels(server: Server) -> None:
    """Whatever clients ask for; machines that only watch the server are left out."""
    for name in ("a", "b", "c"):
        server.http.get(f"/v1/models/{name}")
        server.http.get(f"/{name}/{name}")
        server.http.request(f"TRACE{name}" if name == "c" else "TRACE", "/v1/models")
    for path in ("/health", "/ready", "/version", "/load"):
        server.http.get(path)
    found = {name: count for name, count in scraped(server).items() if name.startswith("http_requests_total ")}
    assert found["http_requests_total /v1/models/{model_id} GET 4xx"] == 3
    assert found["http_requests_total none GET 4xx"] >= 3
    assert not [name for name in found if any(path in name for path in ("/health", "/ready", "/version", "/load"))]
    durations = [name for name in scraped(server) if name.startswith("http_request_duration_seconds_count ")]
    assert len(durations) == len(found)


def test_each_replica_counts_its_own_requests() -> None:
    options = ("--backend", "null", "--max-model-len", "512", "--dp", "2", "--log-level", "warning")
    with Server(BUNDLED, *options, "--kv-memory", "8MiB") as server:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda i: complete(server, prompt=[i] * 50, max_tokens=30, n=2), range(16)))
        counts: dict[str, dict[str, float]] = {}
        for family in text_string_to_metric_families(server.http.get("/metrics").text):
            for sample in family.samples:
                if sample.labels.get("finished_reason", "length") == "length":
                    counts.setdefault(sample.name, {})[sample.labels.get("engine", "")] = sample.value
        finished = counts["vllm:request_success_total"]
        assert finished.keys() == {"0", "1"} and sum(finished.values()) == 32 and min(finished.values()) > 0
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_prompt_tokens"):
            assert counts[f"vllm:{name}_count"] == finished, name
        assert counts["vllm:iteration_tokens_total_count"] == counts["pypto:engine_steps_total"]
