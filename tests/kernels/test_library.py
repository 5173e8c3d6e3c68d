"""That there are kernels at all: other tests skip without them, and would hide that a build lost them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pypto_serving.kernels import runnable

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler: install one, such as Debian's package g++")
def test_a_machine_with_a_compiler_has_kernels() -> None:
    assert "portable" in runnable()


@pytest.mark.soak
def test_without_kernels_all_tests_are_collected() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "tests.kernels.hidden", "tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
