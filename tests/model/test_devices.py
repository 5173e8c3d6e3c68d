"""The torch programs put everything on the device that they were made on, and give the same answers there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch.utils.backend_registration as backends

from tests.model.conftest import MakeCheckpoint

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(
    not hasattr(backends, "_setup_privateuseone_for_python_backend"), reason="this torch has no devices in Python"
)
@pytest.mark.parametrize("kind", ["deepseek_v4_fast", "qwen3_moe"])
def test_a_program_on_another_device(checkpoint: MakeCheckpoint, kind: str) -> None:
    command = [sys.executable, "-m", "tests.model.far_device", str(checkpoint(kind))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    assert float(done.stdout) < 1e-4
