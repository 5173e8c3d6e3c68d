"""Several loads of one server: order, table, files and refusals."""

from __future__ import annotations

import json

import pytest

from pypto_serving.bench.options import parse_loads
from pypto_serving.errors import ConfigError
from tests.bench import command


def invoke(*arguments):
    return command.invoke("sweep", *arguments)


def test_each_load_has_a_line_and_a_result(server, tmp_path):
    file = tmp_path / "r.json"
    small = ("--num-prompts", 4, "--random-input-len", 8, "--random-output-len", 3)
    result = invoke("--base-url", server.url, "--max-concurrency", "2,1", *small, "--output-json", file)
    assert result.exit_code == 0, result.output
    heading, one, two = result.stdout.splitlines()
    assert heading.split()[:4] == ["in", "flight", "req/s", "output"]
    assert (one.split()[0], two.split()[0], one.split()[-1]) == ("1", "2", "0")
    saved = json.loads(file.read_text())
    assert [each["max_concurrency"] for each in saved] == [1, 2]
    assert [each["completed"] for each in saved] == [4, 4] and saved[0]["median_ttft_ms"] > 0


def test_rates_are_loads_too(server):
    small = ("--num-prompts", 3, "--random-input-len", 8, "--random-output-len", 3)
    result = invoke("--base-url", server.url, "--request-rate", "50,200.5", *small)
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["sent/s", "50", "200.5"], result.output


@pytest.mark.parametrize("text", ["", "0", "-1,2", "a", "1,,2", "nan", "1,inf"])
def test_loads_are_positive_numbers(text):
    with pytest.raises(ConfigError, match=r"--request-rate is .* must be positive numbers"):
        parse_loads("--request-rate", text, float)


@pytest.mark.parametrize("text", ["0", "0.5", "1.5,2", "inf"])
def test_requests_in_flight_are_whole(text):
    with pytest.raises(ConfigError, match=r"--max-concurrency is .* must be positive whole numbers"):
        parse_loads("--max-concurrency", text, int)


def test_what_does_not_go_together_is_refused(server):
    result = invoke("--base-url", server.url, "--max-concurrency", "1", "--request-rate", "1")
    assert result.exit_code == 2 and "exclude each other" in result.output
    result = invoke("--base-url", server.url, "--port", 1)
    assert result.exit_code == 2 and "drop --port" in result.output


def test_a_file_that_cannot_be_written_is_one_line(server, tmp_path):
    small = ("--num-prompts", 2, "--random-input-len", 8, "--random-output-len", 3)
    result = invoke(
        "--base-url", server.url, "--max-concurrency", 1, *small, "--output-json", tmp_path / "none" / "r.json"
    )
    assert result.exit_code == 2 and len(result.stdout.splitlines()) == 2
    assert result.stderr.endswith("r.json cannot be written: No such file or directory; give another\n")


def test_a_plot_is_drawn(server, tmp_path):
    small = ("--num-prompts", 2, "--random-input-len", 8, "--random-output-len", 3)
    result = invoke("--base-url", server.url, "--max-concurrency", "1,2", *small, "--plot", tmp_path / "plot.png")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "plot.png").stat().st_size > 1000
