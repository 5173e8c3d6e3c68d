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
def test_programs_on_another_device(checkpoint: MakeCheckpoint) -> None:
    paths = [str(checkpoint(kind)) for kind in ("deepseek_v4_fast", "qwen3_moe")]
    command = [sys.executable, "-m", "tests.model.far_device", *paths]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    assert [float(line) < 1e-4 for line in done.stdout.splitlines()] == [True, True]
