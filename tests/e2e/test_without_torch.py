"""The kernels' path from command to answer in processes where torch cannot be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pypto_serving.setup.locate import BUNDLED
from tests.checkpoints import make_checkpoint
from tests.e2e.server import Server
from tests.needs import needs_kernels

pytestmark = [pytest.mark.e2e, needs_kernels]

ABSENT = """
import sys
from importlib.machinery import PathFinder

class WithoutTorch(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "torch" else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutTorch
"""


@pytest.fixture(autouse=True)
def no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every Python process that is started from here one without torch, workers too."""
    folder = tmp_path / "absent"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(ABSENT)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    found = subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, text=True)
    assert "No module named 'torch'" in found.stderr


def run(*arguments: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pypto_serving", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done


def test_serve() -> None:
    with Server() as server:
        body = {"messages": [{"role": "user", "content": "What is 37+45?"}], "logprobs": True}
        answer = server.http.post("/v1/chat/completions", json=body).json()
        assert "82" in answer["choices"][0]["message"]["content"]


def test_check_generate_and_convert(tmp_path: Path) -> None:
    assert "the best this machine runs" in run("check").stdout
    assert "82" in run("generate", "--chat", "What is 37+45?").stdout
    target = tmp_path / "int8"
    run("convert", BUNDLED, target, "--format", "w8a8")
    assert "82" in run("generate", "--model", target, "--chat", "What is 37+45?").stdout


@pytest.mark.parametrize("kind", [pytest.param("qwen3_moe", marks=pytest.mark.soak), "deepseek_v4_fast"])
def test_other_families(kind: str, tmp_path: Path) -> None:
    """Stored in float32 they are refused, by name of the option with which the kernels serve them."""
    sizes = {"o_lora_rank": 32} if kind == "deepseek_v4_fast" else {}
    model = make_checkpoint(tmp_path / "model", kind, **sizes)
    asked = ("generate", "--model", model, "--kv-memory", "64MiB", "--max-model-len", "512", "--max-tokens", "4", "a")
    assert run(*asked, "--dtype", "bfloat16").stdout
    (line,) = run(*asked, code=2).stderr.strip().splitlines()
    assert "give --dtype bfloat16, or run in the checkout: pip install '.[torch]'" in line


@pytest.mark.parametrize("ranks", [(), ("--tp", "2")])
def test_torch_is_refused_before_anything_starts(ranks: tuple[str, ...]) -> None:
    (line,) = run("serve", "--kernels", "torch", *ranks, code=2).stderr.strip().splitlines()
    assert line.endswith("torch is not installed; drop it, or run in the checkout: pip install '.[torch]'")
