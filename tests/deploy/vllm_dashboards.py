"""What vLLM's dashboards ask for: series that have data here, and those of features that do not exist here."""

from __future__ import annotations

import re
from collections.abc import Mapping

MODEL = 'model_name=~".+"'
OF_ENGINE = f'{MODEL}, engine=~".+"'
GAUGES = (
    f"vllm:num_requests_running{{{OF_ENGINE}}}",
    f"vllm:num_requests_waiting{{{OF_ENGINE}}}",
    f'vllm:num_requests_waiting_by_reason{{{OF_ENGINE}, reason="capacity"}}',
    f'vllm:num_requests_waiting_by_reason{{{OF_ENGINE}, reason="deferred"}}',
    f"vllm:kv_cache_usage_perc{{{OF_ENGINE}}}",
    f'vllm:engine_sleep_state{{{OF_ENGINE}, sleep_state="awake"}}',
    f'vllm:engine_sleep_state{{{OF_ENGINE}, sleep_state="discard_all"}}',
    'vllm:cache_config_info{engine=~".+", num_gpu_blocks=~".+", block_size=~".+", cache_dtype=~".+"}',
    "process_start_time_seconds",
    "process_resident_memory_bytes",
    "process_open_fds",
    "process_max_fds",
)
COUNTERS = (
    f"vllm:request_success_total{{{OF_ENGINE}}}",
    *(f'vllm:request_success_total{{{OF_ENGINE}, finished_reason="{why}"}}' for why in ("stop", "length", "error")),
    f"vllm:prompt_tokens_total{{{OF_ENGINE}}}",
    f"vllm:generation_tokens_total{{{OF_ENGINE}}}",
    f"vllm:num_preemptions_total{{{OF_ENGINE}}}",
    f"vllm:prefix_cache_hits_total{{{OF_ENGINE}}}",
    f"vllm:prefix_cache_queries_total{{{OF_ENGINE}}}",
    f"vllm:external_prefix_cache_hits_total{{{OF_ENGINE}}}",
    f"vllm:external_prefix_cache_queries_total{{{OF_ENGINE}}}",
    f"vllm:prompt_tokens_cached_total{{{OF_ENGINE}}}",
    f'vllm:prompt_tokens_by_source_total{{{OF_ENGINE}, source="local_compute"}}',
    f'vllm:prompt_tokens_by_source_total{{{OF_ENGINE}, source="local_cache_hit"}}',
    f'vllm:prompt_tokens_by_source_total{{{OF_ENGINE}, source="external_kv_transfer"}}',
    "process_cpu_seconds_total",
    'http_requests_total{handler="/v1/completions", method="POST", status="2xx"}',
    'http_requests_total{handler="none", method="GET", status="4xx"}',
)
HISTOGRAMS = (
    *(f'vllm:time_to_first_token_seconds{{{OF_ENGINE}, le="{le}"}}' for le in ("0.1", "0.25", "0.5", "0.75", "1.0")),
    *(f'vllm:time_to_first_token_seconds{{{OF_ENGINE}, le="{le}"}}' for le in ("2.5", "5.0", "10.0")),
    *(
        f'vllm:request_time_per_output_token_seconds{{{OF_ENGINE}, le="{le}"}}'
        for le in ("0.025", "0.05", "0.075", "0.1", "0.15", "0.2", "0.3", "0.5")
    ),
    f"vllm:inter_token_latency_seconds{{{OF_ENGINE}}}",
    f"vllm:e2e_request_latency_seconds{{{OF_ENGINE}}}",
    f"vllm:request_queue_time_seconds{{{OF_ENGINE}}}",
    f"vllm:request_prefill_time_seconds{{{OF_ENGINE}}}",
    f"vllm:request_decode_time_seconds{{{OF_ENGINE}}}",
    f"vllm:request_prompt_tokens{{{OF_ENGINE}}}",
    f"vllm:request_generation_tokens{{{OF_ENGINE}}}",
    f"vllm:request_params_max_tokens{{{OF_ENGINE}}}",
    f"vllm:iteration_tokens_total{{{OF_ENGINE}}}",
    'http_request_duration_seconds{handler="/v1/completions", method="POST"}',
)
"""Without the ending: the dashboards ask for buckets, sums and counts. Those with `le` are their choices of a goal."""
OF_DRAFTS = (
    f"vllm:spec_decode_num_drafts_total{{{OF_ENGINE}}}",
    f"vllm:spec_decode_num_draft_tokens_total{{{OF_ENGINE}}}",
    f"vllm:spec_decode_num_accepted_tokens_total{{{OF_ENGINE}}}",
    f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{OF_ENGINE}, position="0"}}',
)
ABSENT = ("mm_cache_", "lora_requests_info", "estimated_", "sleep_mode_operation_", "rl_weight_update_", "kv_block_")
"""Beginnings of names whose panels stay empty, since the features are not there; docs/metrics.md says so."""
LABELS = re.compile(r'(\w+)(=~|=)"([^"]*)"')


def selectors() -> list[str]:
    """Every series that is asked for, without those of drafts."""
    return [*GAUGES, *COUNTERS, *(series for name in HISTOGRAMS for series in histogram_series(name))]


def histogram_series(histogram: str) -> list[str]:
    """The buckets of a histogram, and unless it is about one bucket its sum and count."""
    name, brace, rest = histogram.partition("{")
    endings = ("_bucket",) if "le=" in rest else ("_bucket", "_sum", "_count")
    return [name + ending + brace + rest for ending in endings]


def expressions() -> list[str]:
    """The series in the shapes that the panels give them."""
    shown = [f"sum by (instance, engine, reason, sleep_state) ({gauge})" for gauge in GAUGES]
    shown += [f"sum by (instance, engine, handler, status) (rate({counter}[10s]))" for counter in COUNTERS + OF_DRAFTS]
    for histogram in HISTOGRAMS:
        buckets, *others = histogram_series(histogram)
        if others:
            total, count = others
            shown.append(f"histogram_quantile(0.95, sum by (le, instance, engine) (rate({buckets}[10s])))")
            shown.append(f"sum by (engine) (rate({total}[10s])) / (sum by (engine) (rate({count}[10s])) > 0)")
        else:
            shown.append(f"sum by (engine) (rate({buckets}[10s]))")
    return shown


def selects(selector: str, name: str, labels: Mapping[str, str]) -> bool:
    """Whether a sample belongs to a selector."""
    wanted, _, matchers = selector.partition("{")
    return wanted == name and all(
        re.fullmatch(value, labels.get(label, "")) if sign == "=~" else labels.get(label) == value
        for label, sign, value in LABELS.findall(matchers)
    )
