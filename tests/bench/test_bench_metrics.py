"""Metric definitions against numbers computed by hand."""

from __future__ import annotations

import pytest

from pypto_serving.bench.metrics import (
    RequestRecord,
    details,
    peak_concurrency,
    peak_output_tokens_per_s,
    statistics_ms,
    summarize,
)
from pypto_serving.bench.options import Reporting


def record(start_s: float = 0.0, ttft_s: float = 0.1, itls_s: tuple[float, ...] = (), tokens: int = 0) -> RequestRecord:
    return RequestRecord(
        prompt_tokens=10,
        output_tokens=tokens or len(itls_s) + 1,
        start_s=start_s,
        ttft_s=ttft_s,
        latency_s=ttft_s + sum(itls_s),
        itls_s=list(itls_s),
    )


FAST = record(0.0, 0.1, (0.02, 0.04))  # TPOT 30 ms, E2EL 160 ms
SLOW = record(0.5, 0.3, (0.1, 0.1, 0.4))  # TPOT 200 ms, E2EL 900 ms
FAILED = RequestRecord(prompt_tokens=10, start_s=0.0, error="HTTP 500: boom")


def test_summary_by_hand():
    result = summarize([FAST, FAILED, SLOW], 2.0, Reporting(percentiles=(50, 99)))
    assert (result["completed"], result["failed"]) == (2, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (20, 7)
    assert result["request_throughput"] == 1.0
    assert result["output_throughput"] == 3.5
    assert result["total_token_throughput"] == 13.5
    assert result["request_goodput"] is None
    assert result["mean_ttft_ms"] == pytest.approx(200)
    assert result["std_ttft_ms"] == pytest.approx(100)
    assert result["p99_ttft_ms"] == pytest.approx(298)
    assert result["mean_tpot_ms"] == pytest.approx(115)
    assert result["median_itl_ms"] == result["p50_itl_ms"] == pytest.approx(100)
    assert result["mean_itl_ms"] == pytest.approx(132)
    assert result["mean_e2el_ms"] == pytest.approx(530)


def test_failed_requests_never_enter_latencies_nor_throughput():
    result = summarize([FAILED, FAILED], 1.0, Reporting())
    assert (result["completed"], result["failed"]) == (0, 2)
    assert result["request_throughput"] == result["output_throughput"] == 0
    assert result["mean_ttft_ms"] is None and result["p99_e2el_ms"] is None


def test_single_token_has_no_tpot():
    assert record(tokens=1).tpot_s is None
    assert summarize([record(tokens=1)], 1.0, Reporting())["mean_tpot_ms"] is None


def test_tpot_counts_tokens_not_chunks():
    assert record(ttft_s=0.1, itls_s=(0.3,), tokens=4).tpot_s == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("goodput_ms", "good"),
    [
        ({"ttft": 300}, 2),
        ({"ttft": 299}, 1),
        ({"tpot": 30.001}, 1),
        ({"e2el": 1000}, 2),
        ({"ttft": 300, "tpot": 29}, 0),
    ],
)
def test_goodput(goodput_ms, good):
    result = summarize([FAST, SLOW, FAILED], 2.0, Reporting(goodput_ms=goodput_ms))
    assert result["request_goodput"] == good / 2.0


def test_only_selected_metrics_and_percentiles_are_reported():
    result = summarize([FAST], 1.0, Reporting(metrics=("itl",), percentiles=(90, 99.9)))
    assert [k for k in result if k.endswith("_ms")] == [
        "mean_itl_ms",
        "median_itl_ms",
        "std_itl_ms",
        "p90_itl_ms",
        "p99.9_itl_ms",
    ]


def test_percentiles_interpolate_linearly():
    result = statistics_ms("ttft", [0.001, 0.002, 0.003, 0.004], [25, 100])
    assert result["p25_ttft_ms"] == pytest.approx(1.75)
    assert result["p100_ttft_ms"] == pytest.approx(4)


def test_peak_output_uses_second_long_buckets_from_the_first_start():
    early, late = record(100.0, 0.5, (0.4, 0.4)), record(101.5, 0.1, (0.1,))
    assert peak_output_tokens_per_s([late, early]) == 3


def test_peak_output_spreads_tokens_over_chunks():
    assert peak_output_tokens_per_s([record(0.0, 0.1, (0.1,), tokens=8)]) == 8
    assert peak_output_tokens_per_s([record(0.0, 0.1, (1.5,), tokens=8)]) == 4
    assert peak_output_tokens_per_s([]) == 0


@pytest.mark.parametrize("duration_s", [0.2, 1.0, 1.5])
def test_the_peak_is_never_below_the_mean(duration_s):
    """A run of 0.2 s has no second of its own."""
    late = record(duration_s - 0.1, 0.05, tokens=50)
    result = summarize([record(0.0, 0.1, tokens=50), late], duration_s, Reporting())
    assert result["max_output_tokens_per_s"] >= result["output_throughput"] == pytest.approx(100 / duration_s)


def test_peak_concurrency_of_half_open_intervals():
    back_to_back = [record(0.0, 1.0), record(1.0, 1.0)]
    assert peak_concurrency(back_to_back) == 1
    assert peak_concurrency([*back_to_back, record(0.5, 1.0)]) == 2
    assert peak_concurrency([]) == 0


def test_details_keep_prompt_order():
    lists = details([FAST, FAILED])
    assert lists["errors"] == ["", "HTTP 500: boom"]
    assert lists["itls"] == [[0.02, 0.04], []]
    assert lists["output_lens"] == [3, 0]
