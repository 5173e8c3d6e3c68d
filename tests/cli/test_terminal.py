"""What commands show on a terminal: completion of values, progress, and tables."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from pypto_serving.store.disk import DiskStore
from tests.store.blocks import BLOCK_BYTES, FINGERPRINT, NUM_SLOTS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("pypto-serving se", ["serve"]),
        ("pypto-serving serve --kernels av", ["avx512_bf16", "avx512", "avx2"]),
        ("pypto-serving check --log-level d", ["debug"]),
        ("pypto-serving serve --kv-store t", ["through"]),
        ("pypto-serving chat --backend nu", ["null"]),
        ("pypto-serving bench serve --dataset-name pre", ["prefix_repetition"]),
    ],
)
def test_completion(words: str, offered: list[str]) -> None:
    environment = {
        **os.environ,
        "_PYPTO_SERVING_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    command = [sys.executable, "-m", "pypto_serving"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=60)
    assert result.stdout.split() == offered


def on_terminal(*command: str) -> str:
    """Run a command with stderr and stdout on a terminal, and return what it shows there."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, cwd=ROOT) as process:
        os.close(theirs)
        shown = b""
        try:
            while piece := os.read(ours, 1 << 16):
                shown += piece
        except OSError:  # the last process has closed the terminal
            pass
        finally:
            os.close(ours)
    assert process.returncode == 0
    return shown.decode()


def test_progress_is_in_units_that_people_read() -> None:
    code = "from pypto_serving.cli.progress import LoadProgress as P; p = P(); p('weights', 0, 3 << 20); "
    shown = on_terminal(sys.executable, "-c", code + "p('weights', 3 << 19, 3 << 20); p('warm-up', 1, 2); p.close()")
    assert "1.5 MiB of 3 MiB" in shown and "1 of 2" in shown and str(3 << 20) not in shown


def test_an_llm_is_quiet() -> None:
    code = "from pypto_serving import LLM\nwith LLM(backend='null') as llm: llm.generate([[1, 2, 3]] * 3)"
    assert on_terminal(sys.executable, "-c", code) == ""


def test_lines_break_between_words_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "from pypto_serving.cli import report\n"
        "from pypto_serving.setup.options import Options\n"
        "from pypto_serving.setup.prepare import model_spec, prepare\n"
        "options = Options(backend='null', model='deepseek_v4')\n"
        "model = model_spec(options)\n"
        "report.show(prepare(options, model), model)"
    )
    monkeypatch.setenv("COLUMNS", "1000")
    words = on_terminal(sys.executable, "-c", code).split()
    monkeypatch.setenv("COLUMNS", "100")
    shown = on_terminal(sys.executable, "-c", code)
    assert max(map(len, shown.splitlines())) <= 100
    static = [word for word in words if not any(map(str.isdigit, word))]
    assert [word for word in shown.split() if not any(map(str.isdigit, word))] == static


def test_kv_stat_breaks_between_words_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = "a model with a long name, bfloat16, avx512_bf16, 32 tokens/block"
    DiskStore(tmp_path, FINGERPRINT, BLOCK_BYTES, NUM_SLOTS, 1 << 30, model=model).close()
    command = (sys.executable, "-m", "pypto_serving", "kv", "stat", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "1000")
    words = on_terminal(*command).split()
    monkeypatch.setenv("COLUMNS", "80")
    shown = on_terminal(*command)
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.split() == words
