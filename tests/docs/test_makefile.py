"""The first `make serve` says what it is doing, in a few lines."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PIP = """\
Obtaining file:///src
  Installing build dependencies: started
  Installing build dependencies: finished with status 'done'
  Preparing editable metadata (pyproject.toml): started
Collecting fastapi>=0.115 (from pypto-serving==0.1.0)
  Downloading fastapi-0.115.0-py3-none-any.whl (94 kB)
Collecting msgspec (from pypto-serving==0.1.0)
Building wheels for collected packages: pypto-serving
  Building editable for pypto-serving (pyproject.toml): started
  Building editable for pypto-serving (pyproject.toml): finished with status 'done'
Installing collected packages: msgspec, fastapi, pypto-serving
Successfully installed fastapi-0.115.0 msgspec-0.19.0 pypto-serving-0.1.0
"""


def test_an_installation_is_a_line_for_each_phase() -> None:
    command = ["make", "--no-print-directory", "--eval", "phases: ; @$(PHASES)", "phases"]
    result = subprocess.run(command, cwd=ROOT, input=PIP, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, "")
    lines = ["fetching build tools", "fetching packages", "building kernels", "installing packages"]
    assert result.stderr == "".join(f"  {line}\n" for line in lines)
