"""Benchmarks without a server, and of starts, on the smallest model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pypto_serving.setup.locate import BUNDLED

pytestmark = pytest.mark.e2e

SMALL = ("--max-model-len", "256", "--input-len", "16", "--output-len", "8")


def bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pypto_serving", "bench", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def result(file: Path, *arguments: str | Path) -> Any:
    done = bench(*arguments)
    assert done.returncode == 0, done.stderr
    assert " (s)" in done.stdout
    return json.loads(file.read_text())


def test_throughput(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    found = result(file, "throughput", *SMALL, "--num-prompts", "6", "--output-json", file)
    assert (found["num_requests"], found["total_num_tokens"]) == (6, 6 * 24)
    assert found["tokens_per_second"] == pytest.approx(3 * found["output_tokens_per_second"])
    assert found["elapsed_time"] * found["requests_per_second"] == pytest.approx(6)


def test_latency(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    runs = ("--num-iters", "4", "--num-iters-warmup", "1", "--batch-size", "2")
    found = result(file, "latency", *SMALL, *runs, "--output-json", file)
    assert len(found["latencies"]) == 4 and found["avg_latency"] == pytest.approx(sum(found["latencies"]) / 4)
    assert min(found["latencies"]) <= found["p10"] <= found["median_latency"] <= found["p99"]


def test_prompts_that_do_not_fit_are_refused() -> None:
    done = bench("throughput", "--max-model-len", "64", "--input-len", "64")
    assert (done.returncode, done.stderr.strip()) == (
        2,
        "error: --input-len and --output-len are 128 tokens; at most 64 fit",
    )


def test_startup(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    found = result(file, "startup", "--runs", "2", "--output-json", file, "--", "--max-model-len", "256")
    assert len(found) == 2 and all(0 < times["ready_s"] < times["answered_s"] for times in found)


@pytest.mark.soak
def test_a_model_without_chats_starts_too(tmp_path: Path) -> None:
    folder = shutil.copytree(BUNDLED, tmp_path / "base")
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    del tokenizer["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    done = bench("startup", "--runs", "1", "--", folder, "--max-model-len", "256")
    assert done.returncode == 0, done.stderr


def test_a_server_that_does_not_start_is_said() -> None:
    done = bench("startup", "--runs", "1", "--", "/nowhere")
    assert done.returncode != 0
    assert done.stderr.startswith("error: the server did not start: error: ") and done.stderr.count("\n") == 1
    done = bench("startup", "--runs", "1", "--", "--help")
    assert (done.returncode, done.stderr) == (1, "error: the server did not start: it said nothing\n")
