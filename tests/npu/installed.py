"""Environments with a PyPTO: the double in its revisions, or the one that is installed."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOUBLE = ROOT / "tests" / "npu" / "double"
REVISIONS = ("2026-06", "2026-08")
EACH_REVISION = [pytest.param(name, marks=pytest.mark.soak if name != REVISIONS[-1] else ()) for name in REVISIONS]
"""The newest; the others in the soak only."""
INSTALLED = importlib.util.find_spec("pypto") is not None


def with_double(runtime: str = "2026-06", programs: str = "2026-08", **more: str) -> dict[str, str]:
    """The variables with which a process finds the double."""
    path = os.pathsep.join([str(DOUBLE), str(ROOT)])
    return {"PYTHONPATH": path, "PYPTO_DOUBLE_REVISION": runtime, "PYPTO_LIB_DOUBLE_REVISION": programs, **more}
