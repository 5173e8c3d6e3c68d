"""The command line: exit codes, one-line errors, saved files."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pypto_serving.setup.locate import BUNDLED
from tests.bench.command import invoke

SMALL = ["--random-input-len", "8", "--random-output-len", "4", "--num-prompts", "6"]


def serve(server, *arguments):
    return invoke("serve", "--base-url", server.url, *SMALL, *arguments)


def test_serve_prints_the_table(server):
    result = serve(server, "--max-concurrency", 2, "--num-warmups", 1, "--goodput", "ttft:60000")
    assert result.exit_code == 0, result.output
    assert "Successful requests:                     6" in result.stdout
    assert "Maximum request concurrency:             2" in result.stdout
    assert "Request goodput (req/s):" in result.stdout


@pytest.mark.parametrize("suffix", ["/", "/v1", "/v1/"])
def test_the_base_url_may_end_in_v1(server, suffix):
    for backend in ("openai", "openai-chat"):
        named = ("--backend", backend, "--tokenizer", BUNDLED)
        result = invoke("serve", "--base-url", server.url + suffix, *SMALL, *named)
        assert result.exit_code == 0, result.output
        assert "Successful requests:                     6" in result.stdout


@pytest.mark.parametrize("backend", [(), ("--backend", "openai-chat", "--tokenizer", BUNDLED)])
def test_whole_replies_have_no_latencies_of_tokens(server, tmp_path, backend):
    where = ("--save-result", "--save-detailed", "--result-dir", tmp_path, "--result-filename", "r.json")
    model = ("--model", "whole", "--vocab-size", 50)
    result = serve(server, "--disable-stream", *model[: None if not backend else 2], *backend, *where)
    assert result.exit_code == 0, result.output
    assert "Successful requests:                     6" in result.stdout
    assert "Mean E2EL (ms):" in result.stdout and "Total generated tokens:                  18" in result.stdout
    assert "Peak output token throughput (tok/s):    n/a" in result.stdout
    assert "TTFT" not in result.stdout and "TPOT" not in result.stdout and "ITL" not in result.stdout
    saved = json.loads((tmp_path / "r.json").read_text())
    assert saved["mean_e2el_ms"] > 0 and not [key for key in saved if "ttft_ms" in key or "tpot" in key]
    assert saved["ttfts"] == [None] * 6 and saved["generated_texts"] == ["abc"] * 6


@pytest.mark.parametrize(
    ("model", "error"), [("server_error", "HTTP 500: the engine died"), ("empty_whole", "error in")]
)
def test_whole_replies_that_fail(server, model, error):
    result = serve(server, "--disable-stream", "--model", model, "--vocab-size", 50)
    assert result.exit_code == 1
    assert f"failed: 6 x {error}" in result.stderr


@pytest.mark.parametrize("option", [("--percentile-metrics", "e2el,ttft"), ("--goodput", "tpot:5")])
def test_metrics_of_streams_are_refused_without_one(server, option):
    result = serve(server, "--disable-stream", *option)
    assert result.exit_code == 2
    assert "which only streams show, but --disable-stream is given; drop one of them" in result.stderr
    assert (
        serve(server, "--disable-stream", "--model", "whole", "--vocab-size", 9, "--goodput", "e2el:9e9").exit_code == 0
    )


def test_serve_over_chat_from_a_file(server, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "hello", "output_tokens": 3}\n')
    chat = ("--backend", "openai-chat", "--dataset-name", "custom", "--dataset-path", path)
    result = invoke("serve", "--base-url", server.url, "--num-prompts", 2, *chat)
    assert result.exit_code == 0, result.output
    assert [b["messages"][0]["content"] for b in server.bodies] == ["hello"] * 2
    assert not any("ignore_eos" in b for b in server.bodies)


def test_serve_saves_what_was_asked(server, tmp_path):
    where = ("--result-dir", tmp_path, "--result-filename", "r.json")
    result = serve(server, "--save-result", *where, "--metadata", "tp=1", "--metadata", "note=x")
    assert result.exit_code == 0, result.output
    saved = json.loads((tmp_path / "r.json").read_text())
    assert (saved["completed"], saved["tp"], saved["note"]) == (6, "1", "x")
    assert "errors" not in saved
    assert serve(server, "--save-result", "--save-detailed", *where).exit_code == 0
    assert json.loads((tmp_path / "r.json").read_text())["errors"] == [""] * 6


def test_exit_code_is_1_when_every_request_failed(server, tmp_path):
    save = ("--save-result", "--result-dir", tmp_path, "--result-filename", "r.json")
    result = serve(server, "--model", "server_error", "--vocab-size", 50, *save)
    assert result.exit_code == 1
    assert "Failed requests:                         6" in result.stdout
    assert "failed: 6 x HTTP 500: the engine died" in result.stderr
    assert json.loads((tmp_path / "r.json").read_text())["failed"] == 6


def test_exit_code_is_0_when_some_requests_failed(server):
    result = serve(server, "--model", "every_third_fails", "--vocab-size", 50, "--max-concurrency", 1)
    assert result.exit_code == 0
    assert "Failed requests:                         2" in result.stdout


def test_unreachable_server_is_one_line():
    result = invoke("serve", "--port", 1)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: GET http://127.0.0.1:1/v1/models: ")
    assert result.stderr.count("\n") == 1


RAMP = ("--ramp-up-strategy", "linear", "--ramp-up-start-rps", 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-concurrency", 0), "--max-concurrency must be at least 1, got 0"),
        (("--request-rate", 0), "--request-rate must be a number above 0 or inf, got 0"),
        (("--request-rate", "nan"), "--request-rate must be a number above 0 or inf, got nan"),
        (("--num-prompts", 0), "--num-prompts must be at least 1, got 0"),
        (("--num-warmups", -1), "--num-warmups must be at least 0"),
        (("--random-range-ratio", 1.5), "--random-range-ratio must be in [0, 1), got 1.5"),
        (("--goodput", "speed:3"), "unknown metric 'speed'"),
        (("--percentile-metrics", "speed"), "unknown metric 'speed'"),
        (("--metric-percentiles", "-1"), "must lie in 0 to 100"),
        (("--extra-body", "3"), "--extra-body must be a JSON object"),
        (("--vocab-size", 0), "--vocab-size must be at least 1"),
        (("--timeout", 0), "--timeout must be a finite number above 0"),
        (RAMP, "give all three"),
        ((*RAMP, "--ramp-up-end-rps", 2, "--request-rate", 3), "leave --request-rate out"),
        (("--dataset-name", "custom"), "needs --dataset-path FILE.jsonl"),
        (("--dataset-path", "x.jsonl"), "--dataset-path belongs to --dataset-name custom"),
        (("--prefix-repetition-suffix-len", 3), "belongs to --dataset-name prefix_repetition"),
        (("--dataset-name", "prefix_repetition", "--random-input-len", 3), "--random-input-len belongs to"),
        (("--base-url", "http://h", "--port", 1), "--base-url already names the server; drop --port"),
        (("--save-detailed",), "--save-detailed has no effect without --save-result"),
        (("--metadata", "a=b"), "--metadata has no effect without --save-result"),
        (("--save-result", "--metadata", "duration=b"), "--metadata duration=...: the result has a key"),
        (("--backend", "openai-chat", "--vocab-size", 9, "--model", "m"), "give --tokenizer DIR"),
    ],
)
def test_senseless_arguments_are_one_line_and_exit_code_2(arguments, message):
    result = invoke("serve", *arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ") and message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [("--num-prompts", "x"), ("--request-rate", "fast"), ("--backend", "tgi"), ("--port", 0), ("--nonsense",)],
)
def test_unparsable_arguments_are_exit_code_2(arguments):
    assert invoke("serve", *arguments).exit_code == 2


def test_compare(server, tmp_path):
    for name in ("a.json", "b.json"):
        serve(server, "--save-result", "--result-dir", tmp_path, "--result-filename", name)
    result = invoke("compare", tmp_path / "a.json", tmp_path / "b.json")
    assert result.exit_code == 0, result.output
    assert "mean_ttft_ms" in result.stdout
    missing = invoke("compare", tmp_path / "a.json", tmp_path / "none.json")
    assert missing.exit_code == 2 and missing.stderr.startswith("error: ")


def test_importing_the_command_line_is_light():
    code = "import sys, pypto_serving.cli.bench; print([m for m in sys.modules if m in HEAVY])"
    code = code.replace("HEAVY", "('numpy', 'uvloop', 'torch', 'pypto_serving.bench')")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
