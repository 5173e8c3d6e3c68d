"""What /metrics shows."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from pypto_serving.engine.client import Health
from pypto_serving.engine.metrics import Histogram, ServerMetrics
from pypto_serving.parallel.topology import Topology
from pypto_serving.types.request import StepStats, TierStats, Timeline
from tests.api.scripted_engine import Script, ScriptedEngine, engine_config
from tests.configs import change_config


def scraped(metrics: ServerMetrics) -> dict[str, float]:
    """Samples by name, with labels other than the model's name appended."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name", "tiny") == "tiny"
            assert labels.pop("engine", "0") == "0"
            found[sample.name + "".join(f",{k}={v}" for k, v in sorted(labels.items()))] = sample.value
    return found


def new_metrics() -> tuple[ScriptedEngine, ServerMetrics]:
    engine = ScriptedEngine(engine_config(100, max_model_len=300), lambda request: Script([]))
    return engine, ServerMetrics(engine, "tiny")


def test_histogram_bounds_are_inclusive() -> None:
    histogram = Histogram([1, 2])
    for value in (0.5, 1, 1.5, 2, 7):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 2.0), ("2.0", 4.0), ("+Inf", 5.0)]
    assert histogram.sum == 12


def test_the_newest_snapshot_is_shown() -> None:
    engine, metrics = new_metrics()
    engine.stats = StepStats(
        num_running=3, num_waiting=2, num_steps=9, num_preemptions=1, num_respawns=4, prompt_tokens=50,
        generation_tokens=20, prefix_queries=50, prefix_hits=16, kv_usage=(0.25,), core_s=0.5, computing_s=1.5,
    )  # fmt: skip
    engine.state = Health(ok=False, status="stalled", age_s=7.5)
    found = scraped(metrics)
    expected = {
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 2,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:prefix_cache_queries_total": 50,
        "vllm:prefix_cache_hits_total": 16,
        "vllm:prompt_tokens_total": 50,
        "vllm:generation_tokens_total": 20,
        "vllm:num_preemptions_total": 1,
        "pypto:worker_respawns_total": 4,
        "pypto:engine_steps_total": 9,
        "pypto:step_part_seconds_total,part=core": 0.5,
        "pypto:step_part_seconds_total,part=computing": 1.5,
        "pypto:engine_ok": 0,
        "pypto:last_step_age_seconds": 7.5,
        "pypto:kv_group_usage_perc,group=full": 0.25,
    }
    assert {name: found[name] for name in expected} == expected


def test_ranks_of_each_host_count_while_they_compute() -> None:
    engine, metrics = new_metrics()
    assert scraped(metrics)["pypto:ranks,host=0"] == 1
    engine.config = change_config(engine.config, topology=Topology(tensor=3, hosts=2))
    found = scraped(metrics)
    assert (found["pypto:ranks,host=0"], found["pypto:ranks,host=1"]) == (2, 1)
    engine.stats = engine.stats.ended()
    found = scraped(metrics)
    assert (found["pypto:ranks,host=0"], found["pypto:ranks,host=1"]) == (0, 0)


def test_no_series_ends_with_a_core() -> None:
    engine, metrics = new_metrics()
    tier = dict.fromkeys(TierStats.__struct_fields__, 1) | {"tier": "host", "writable": True}
    engine.stats = StepStats(num_steps=9, kv_usage=(0.25,), tiers=(TierStats(**tier),))
    before = scraped(metrics)
    engine.stats = engine.stats.ended()
    after = scraped(metrics)
    assert after.keys() == before.keys()
    assert (after["pypto:kv_group_usage_perc,group=full"], after["pypto:engine_steps_total"]) == (0, 9)


def test_a_request_leaves_its_times() -> None:
    _, metrics = new_metrics()
    metrics.first_token[0].observe(0.3)
    metrics.next_token[0].observe(0.02)
    metrics.observe_finish("length", 10, 5, 4.5, Timeline(1.0, 1.5, 2.0, 4.0, num_preemptions=2), num_cached=4)
    metrics.observe_finish("abort", 10, 1, 9.0, None)
    found = scraped(metrics)
    expected = {
        "vllm:time_to_first_token_seconds_sum": 0.3,
        "vllm:inter_token_latency_seconds_sum": 0.02,
        "vllm:e2e_request_latency_seconds_sum": 4.5,
        "vllm:request_queue_time_seconds_sum": 0.5,
        "vllm:request_prefill_time_seconds_sum": 0.5,
        "vllm:request_decode_time_seconds_sum": 2.0,
        "vllm:request_inference_time_seconds_sum": 2.5,
        "vllm:request_time_per_output_token_seconds_sum": 0.5,
        "vllm:request_prompt_tokens_sum": 10,
        "vllm:request_generation_tokens_sum": 5,
        "vllm:request_prefill_kv_computed_tokens_sum": 6,
        "vllm:request_num_preemptions_sum": 2,
        "vllm:request_success_total,finished_reason=length": 1,
        "vllm:request_success_total,finished_reason=abort": 1,
        "vllm:request_success_total,finished_reason=stop": 0,
    }
    assert {name: found[name] for name in expected} == expected
    assert found["vllm:request_prompt_tokens_bucket,le=500.0"] == 1


def test_cached_tokens_are_counted_as_vllm_does() -> None:
    engine, metrics = new_metrics()
    tier = dict.fromkeys(TierStats.__struct_fields__, 0) | {"tier": "remote", "writable": True, "hit_tokens": 30}
    engine.stats = StepStats(prompt_tokens=100, prefix_queries=100, prefix_hits=50, tiers=(TierStats(**tier),))
    found = scraped(metrics)
    expected = {
        "vllm:prefix_cache_queries_total": 100,
        "vllm:prefix_cache_hits_total": 20,
        "vllm:external_prefix_cache_queries_total": 80,
        "vllm:external_prefix_cache_hits_total": 30,
        "vllm:prompt_tokens_cached_total": 50,
        "vllm:prompt_tokens_by_source_total,source=local_compute": 50,
        "vllm:prompt_tokens_by_source_total,source=local_cache_hit": 20,
        "vllm:prompt_tokens_by_source_total,source=external_kv_transfer": 30,
        "vllm:prompt_tokens_cached_by_source_total,source=device": 20,
        "vllm:prompt_tokens_cached_by_source_total,source=external_unspecified": 30,
    }
    assert {name: found[name] for name in expected} == expected


def test_waiting_requests_have_a_reason() -> None:
    engine, metrics = new_metrics()
    engine.stats = StepStats(num_waiting=7, num_deferred=3)
    found = scraped(metrics)
    assert found["vllm:num_requests_waiting_by_reason,reason=capacity"] == 4
    assert found["vllm:num_requests_waiting_by_reason,reason=deferred"] == 3


def test_an_answer_leaves_what_was_asked_for() -> None:
    _, metrics = new_metrics()
    metrics.observe_answer(num_choices=3, max_tokens=40, num_longest=12)
    metrics.count_rejection("max_num_queued_tokens")
    metrics.count_corrupted()
    found = scraped(metrics)
    assert found["vllm:request_params_n_sum"] == 3
    assert found["vllm:request_params_max_tokens_sum"] == 40
    assert found["vllm:request_max_num_generation_tokens_sum"] == 12
    assert found["vllm:admission_rejections_total,reason=max_num_queued_tokens"] == 1
    assert found["vllm:admission_rejections_total,reason=max_num_queued_reqs"] == 0
    assert found["vllm:corrupted_requests_total"] == 1


def test_each_step_is_counted_once() -> None:
    _, metrics = new_metrics()
    for num_steps, step_tokens in ((1, (64,)), (1, ()), (3, (6, 2))):
        metrics.observe_step(StepStats(num_steps=num_steps, step_tokens=step_tokens))
    found = scraped(metrics)
    assert (found["vllm:iteration_tokens_total_count"], found["vllm:iteration_tokens_total_sum"]) == (3, 72)


def test_responses_are_counted_by_status() -> None:
    _, metrics = new_metrics()
    for status in (200, 200, 429):
        metrics.count_response(status)
    found = scraped(metrics)
    assert found["pypto:http_responses_total,status=200"] == 2
    assert found["pypto:http_responses_total,status=429"] == 1
