"""Arrivals, concurrency, warm-ups, and what a whole run reports."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from pypto_serving.bench.client import BenchmarkError
from pypto_serving.bench.datasets import PrefixRepetitionData, RandomData
from pypto_serving.bench.options import RampUp, Reporting, Target, Traffic
from pypto_serving.bench.runner import Benchmark, ClientLoad, arrival_times_s, run, watch_client
from pypto_serving.errors import ConfigError

DATA = RandomData(input_len=8, output_len=4)


def benchmark(server, *, model=None, dataset=DATA, vocab_size=None, **traffic):
    target = Target(base_url=server.url, model=model)
    return Benchmark(
        target=target,
        traffic=Traffic(**{"num_prompts": 6, **traffic}),
        dataset=dataset,
        reporting=Reporting(),
        vocab_size=vocab_size,
    )


def test_all_arrive_at_once_at_infinite_rate():
    assert arrival_times_s(Traffic(num_prompts=5)).tolist() == [0] * 5


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_finite_rate_ends_on_time_and_burstiness_sets_the_spread(burstiness):
    times = arrival_times_s(Traffic(num_prompts=20000, request_rate=4.0, burstiness=burstiness))
    gaps = np.diff(times)
    assert times[-1] == pytest.approx(5000)
    assert gaps.min() >= 0
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_arrivals_depend_on_the_seed_only():
    traffic = {"num_prompts": 10, "request_rate": 4.0}
    assert arrival_times_s(Traffic(**traffic)).tolist() == arrival_times_s(Traffic(**traffic)).tolist()
    assert arrival_times_s(Traffic(**traffic)).tolist() != arrival_times_s(Traffic(**traffic, seed=1)).tolist()


def test_ramp_up_arrives_ever_faster():
    ramp_up = RampUp(strategy="linear", start_rps=1, end_rps=100)
    gaps = np.diff(arrival_times_s(Traffic(num_prompts=4000, ramp_up=ramp_up)))
    assert gaps[:1000].mean() > 4 * gaps[-1000:].mean()


def test_run_asks_the_server_for_model_and_vocabulary(server):
    outcome = asyncio.run(run(benchmark(server)))
    assert outcome.result["model_id"] == "ok"
    assert outcome.result["completed"] == 6 and outcome.result["total_output_tokens"] == 24
    assert outcome.result["client_cpu_share"] > 0
    assert all(body["ignore_eos"] and max(body["prompt"]) < 100 for body in server.bodies)


def test_run_without_a_vocabulary_says_what_to_give(server):
    server.model_card = {"id": "ok"}
    with pytest.raises(ConfigError, match="give --tokenizer DIR or --vocab-size N"):
        asyncio.run(run(benchmark(server)))
    assert server.bodies == []
    assert asyncio.run(run(benchmark(server, vocab_size=50))).result["completed"] == 6


def test_run_without_a_server(server):
    server.model_card = {"id": "other", "vocab_size": 3}
    with pytest.raises(BenchmarkError, match="does not list ok"):
        asyncio.run(run(benchmark(server, model="ok")))


@pytest.mark.parametrize("max_concurrency", [1, 4])
def test_concurrency_is_reached_and_never_passed(server, max_concurrency):
    server.gate = max_concurrency
    load = benchmark(server, model="gated", vocab_size=50, num_prompts=9, max_concurrency=max_concurrency)
    outcome = asyncio.run(run(load))
    assert outcome.result["completed"] == 9
    assert server.peak_in_flight == max_concurrency
    assert outcome.result["max_concurrent_requests"] <= max_concurrency


def test_warm_ups_come_first_and_are_not_measured(server):
    dataset = PrefixRepetitionData(prefix_len=8, suffix_len=4, num_prefixes=1, output_len=2)
    load = benchmark(server, dataset=dataset, num_prompts=3, num_warmups=2, max_concurrency=1)
    finished = []
    outcome = asyncio.run(run(load, lambda: finished.append(1)))
    assert len(server.bodies) == 5 and len(finished) == outcome.result["completed"] == 3
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len({p[:8] for p in prompts}) == 1 and len(set(prompts)) == 5


def test_failed_warm_ups_are_told(server):
    outcome = asyncio.run(run(benchmark(server, model="busy", vocab_size=50, num_warmups=2)))
    assert "2 of 2 warm-up requests failed: HTTP 429: queue full" in outcome.warnings


def test_a_server_that_refuses_everything_is_a_failure_throughout(server):
    outcome = asyncio.run(run(benchmark(server, model="server_error", vocab_size=50)))
    result = outcome.result
    assert (result["completed"], result["failed"]) == (0, 6)
    assert result["request_throughput"] == result["output_throughput"] == 0
    assert result["mean_ttft_ms"] is None
    assert {r.error for r in outcome.records} == {"HTTP 500: the engine died"}


def test_partial_failures_are_counted(server):
    load = benchmark(server, model="every_third_fails", vocab_size=50, max_concurrency=1)
    outcome = asyncio.run(run(load))
    assert [bool(r.error) for r in outcome.records] == [False, False, True] * 2
    assert (outcome.result["completed"], outcome.result["failed"]) == (4, 2)
    assert outcome.result["total_output_tokens"] == 16


def test_finite_rate_run(server):
    outcome = asyncio.run(run(benchmark(server, request_rate=500.0, burstiness=2.0)))
    assert outcome.result["completed"] == 6 and outcome.result["request_rate"] == 500.0


def test_client_load_is_measured():
    async def spin():
        async with watch_client() as load:
            await asyncio.sleep(0)
            start_s = time.process_time()
            while time.process_time() < start_s + 0.05:
                pass
            await asyncio.sleep(0.03)
        return load

    load = asyncio.run(spin())
    assert load.cpu_share > 0 and load.wait_share >= 0
    assert max(load.lags_s) > 0.02


@pytest.mark.parametrize(
    ("load", "warns"),
    [
        (ClientLoad(cpu_share=0.5, lags_s=[0.001, 0.002]), False),
        (ClientLoad(cpu_share=0.3, wait_share=0.4), False),
        (ClientLoad(cpu_share=0.3, wait_share=0.6), True),
        (ClientLoad(cpu_share=0.95, lags_s=[0.001]), True),
        (ClientLoad(cpu_share=0.5, lags_s=[0.001, 0.04]), True),
        (ClientLoad(), False),
    ],
)
def test_client_saturation_is_told(load, warns):
    warning = load.warning()
    assert (warning is not None) == warns
    assert warning is None or warning.startswith("the client is the bottleneck")
