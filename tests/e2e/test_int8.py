"""The bundled model in W8A8, converted and served by the commands that a user gives."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bundled_model.arithmetic import is_correct, sample_questions

from pypto_serving import LLM, SamplingParams
from pypto_serving.setup.locate import BUNDLED
from tests.checkpoints import make_checkpoint
from tests.compressed import compress
from tests.e2e.questions import user
from tests.e2e.server import Server
from tests.needs import needs_kernels

pytestmark = [pytest.mark.e2e, needs_kernels]

QUESTIONS, WRONG = 150, 2
"""How many sums and differences are asked, and how many may be wrong. In bfloat16 none is."""


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    target = tmp_path_factory.mktemp("int8") / "bundled"
    command = [sys.executable, "-m", "pypto_serving", "convert", BUNDLED, target, "--format", "w8a8"]
    subprocess.run(command, check=True)
    yield target


def test_the_bundled_model_stays_as_accurate(converted: Path) -> None:
    problems = sample_questions(QUESTIONS, seed=1)
    greedy = SamplingParams(temperature=0, max_tokens=40)
    with LLM(str(converted), max_model_len=512, log_level="warning") as llm:
        results = llm.chat([[user(question)] for question, _ in problems], greedy, progress=False)
    right = [
        is_correct(result.outputs[0].text, expected) for result, (_, expected) in zip(results, problems, strict=True)
    ]
    assert right.count(False) <= WRONG


def test_what_llm_compressor_writes_is_served(tmp_path: Path) -> None:
    path = compress(make_checkpoint(tmp_path / "model", "qwen3_moe"))
    with Server(path, "--kv-memory", "64MiB", "--max-model-len", "512") as server:
        body = {"prompt": "Hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        first, second = (server.http.post("/v1/completions", json=body).json() for _ in range(2))
        assert first["usage"]["completion_tokens"] == 8
        assert first["choices"] == second["choices"]


def command_error(*arguments: str | Path) -> str:
    """The one line that a command ends with."""
    command = [sys.executable, "-m", "pypto_serving", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in (2, 3)
    (line,) = done.stderr.strip().splitlines()
    return line


def test_errors_are_one_line(converted: Path, tmp_path: Path) -> None:
    assert "only the CPU kernels serve" in command_error("serve", converted, "--kernels", "torch")
    assert "quantised already" in command_error("convert", converted, tmp_path / "x", "--format", "w8a8")
    assert "complete checkpoint already" in command_error("convert", BUNDLED, converted, "--format", "w8a8")
    assert "does not exist" in command_error("convert", tmp_path / "nothing", tmp_path / "x", "--format", "w8a8")


def test_check_counts_int8_weights(converted: Path) -> None:
    command = [sys.executable, "-m", "pypto_serving", "check", converted]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "w8a8 weights" in shown
