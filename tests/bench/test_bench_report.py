"""The table, the JSON keys, and the comparison."""

from __future__ import annotations

import json

import pytest

from pypto_serving.bench.metrics import RequestRecord, details, summarize
from pypto_serving.bench.options import Reporting, Target, Traffic
from pypto_serving.bench.plots import plot_comparison
from pypto_serving.bench.report import (
    Saving,
    failure_lines,
    load_result,
    render,
    render_comparison,
    settings,
)
from pypto_serving.errors import ConfigError

RECORD = RequestRecord(
    prompt_tokens=100, output_tokens=3, start_s=0.0, ttft_s=0.1, latency_s=0.2, itls_s=[0.04, 0.06], text="abc"
)
FAILED = RequestRecord(error="HTTP 429: queue full")

TABLE = """\
============ Serving Benchmark Result ============
Successful requests:                     2
Failed requests:                         1
Maximum request concurrency:             2
Request rate configured (RPS):           1.50
Benchmark duration (s):                  2.00
Total input tokens:                      200
Total generated tokens:                  6
Request throughput (req/s):              1.00
Request goodput (req/s):                 1.00
Output token throughput (tok/s):         3.00
Peak output token throughput (tok/s):    6.00
Peak concurrent requests:                2.00
Total token throughput (tok/s):          103.00
---------------Time to First Token----------------
Mean TTFT (ms):                          100.00
Median TTFT (ms):                        100.00
P99 TTFT (ms):                           100.00
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          50.00
Median TPOT (ms):                        50.00
P99 TPOT (ms):                           50.00
---------------Inter-token Latency----------------
Mean ITL (ms):                           50.00
Median ITL (ms):                         50.00
P99 ITL (ms):                            60.00
----------------End-to-end Latency----------------
Mean E2EL (ms):                          200.00
Median E2EL (ms):                        200.00
P99 E2EL (ms):                           200.00
=================================================="""

SETTING_KEYS = {
    *("date", "backend", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness"),
    "max_concurrency",
}
RESULT_KEYS = {
    *("duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput"),
    *("request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s"),
    "max_concurrent_requests",
    *(f"{s}_{m}_ms" for s in ("mean", "median", "std", "p99") for m in ("ttft", "tpot", "itl", "e2el")),
}
DETAIL_KEYS = {"input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors", "start_times", "latencies"}


def result(records=(RECORD, RECORD, FAILED), *, duration_s=2.0, goodput_ms=None, **traffic):
    run = settings(Target(), Traffic(**traffic), "org/model", None)
    return run | summarize(records, duration_s, Reporting(goodput_ms=goodput_ms or {}))


def test_table_is_that_of_vllm():
    lines = render(result(goodput_ms={"ttft": 100.1}, max_concurrency=2, request_rate=1.5)).splitlines()
    assert [line.rstrip() for line in lines] == TABLE.splitlines()
    assert {len(line) for line in lines if ":" in line} == {51}


def test_table_leaves_out_what_was_not_asked_and_shows_what_is_missing():
    text = render(result([FAILED]))
    for label in ("Maximum request concurrency", "Request rate configured", "Request goodput"):
        assert label not in text
    assert "Mean TTFT (ms):                          n/a" in text


def test_result_has_the_keys_of_vllm():
    assert result().keys() == SETTING_KEYS | RESULT_KEYS
    assert details([RECORD]).keys() == DETAIL_KEYS
    assert result()["request_rate"] == "inf"


def test_saved_file_is_read_back(tmp_path):
    saving = Saving(directory=tmp_path / "new" / "folder", metadata={"tp": "2"})
    saving.check(Reporting())
    path = saving.write(result(max_concurrency=4))
    assert path.name.startswith("openai-infqps-concurrency4-model-")
    loaded = json.loads(path.read_text())
    assert loaded["tp"] == "2" and loaded["p99_itl_ms"] == pytest.approx(60)
    assert load_result(path) == loaded


def test_metadata_may_not_hide_behind_a_result_key(tmp_path):
    with pytest.raises(ConfigError, match=r"--metadata p99_itl_ms=.*: the result has a key of that name"):
        Saving(directory=tmp_path, metadata={"p99_itl_ms": "1"}).check(Reporting())


def test_unusable_result_folder_is_told_before_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="set --result-dir"):
        Saving(directory=tmp_path / "file", metadata={}).check(Reporting())


def test_failures_are_grouped():
    other = RequestRecord(error="connection failed: refused")
    assert failure_lines([FAILED, other, RECORD, FAILED]) == [
        "failed: 2 x HTTP 429: queue full",
        "failed: 1 x connection failed: refused",
    ]


def test_comparison_tells_direction_and_differing_settings():
    slower = RequestRecord(**{name: getattr(RECORD, name) for name in RECORD.__slots__} | {"ttft_s": 0.15})
    a, b = result([RECORD], duration_s=1.0), result([slower, slower], duration_s=1.0, num_prompts=2)
    lines = render_comparison(a, b).splitlines()
    assert "num_prompts                             1000             2  settings differ" in lines
    assert "request_throughput                      1.00          2.00   +100.0%  better" in lines
    assert "mean_ttft_ms                          100.00        150.00    +50.0%  worse" in lines
    assert "mean_e2el_ms                          200.00        200.00     +0.0%" in lines


def test_comparison_with_missing_values():
    text = render_comparison(result([FAILED]), result())
    assert "mean_ttft_ms                             n/a        100.00       n/a" in text


def test_comparison_takes_a_vllm_file(tmp_path):
    path = tmp_path / "vllm.json"
    path.write_text(json.dumps({"date": "x", "mean_ttft_ms": 50.0, "p99.9_itl_ms": 7.0, "output_throughput": 3}))
    text = render_comparison(load_result(path), result())
    assert "mean_ttft_ms                           50.00        100.00   +100.0%  worse" in text
    assert "p99.9_itl_ms                            7.00           n/a       n/a" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [("{oops", "is not a JSON object"), ("[1]", "is not a JSON object"), ("{}", "holds no benchmark metrics")],
)
def test_files_without_a_result_are_refused(tmp_path, text, message):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_result(path)


def test_missing_result_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load_result(tmp_path / "none.json")


def test_plot(tmp_path):
    plot_comparison(result([RECORD]), result(), tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="name an image file"):
        plot_comparison(result(), result(), tmp_path / "c.nonsense")
