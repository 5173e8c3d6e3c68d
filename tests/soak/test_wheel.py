"""The wheel of `make wheel` in an environment without compiler and without torch: install it, serve, ask."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pypto_serving.kernels import runnable
from tests.e2e.server import Server
from tests.needs import needs_kernels

pytestmark = [pytest.mark.soak, needs_kernels]

ROOT = Path(__file__).resolve().parents[2]
MAX_BYTES = 250 * 10**6
"""Of everything that is installed, but pip and its setuptools."""


def output(*command: str | Path) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(1200)
def test_a_wheel_serves_where_there_is_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = ROOT / output("make", "--no-print-directory", "wheel").strip().splitlines()[-1]
    assert "manylinux_2_" in wheel.name and wheel.name.startswith("pypto_serving-")
    for name in set(os.environ) - {"HOME"}:
        if not name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(tmp_path))
    output(sys.executable, "-m", "venv", tmp_path / "venv")
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    before = folder_bytes(packages)
    python, program = tmp_path / "venv/bin/python", tmp_path / "venv/bin/pypto-serving"
    output(python, "-m", "pip", "install", "--quiet", wheel)
    assert not (packages / "torch").exists()
    assert folder_bytes(packages) - before < MAX_BYTES
    checked = json.loads(output(program, "check", "--json"))
    assert ("kernels", runnable()[0]) in {(setting["name"], setting["value"]) for setting in checked["settings"]}
    with Server(program=[str(program)]) as server:
        body = {"messages": [{"role": "user", "content": "What is 37+45?"}]}
        answer = server.http.post("/v1/chat/completions", json=body).json()
        assert "82" in answer["choices"][0]["message"]["content"]
        for path in ("/", "/dashboard", "/web/playground.js"):
            assert server.http.get(path).status_code == 200


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
