"""That there are kernels at all: other tests skip without them, and would hide that a build lost them."""

from __future__ import annotations

import shutil

import pytest

from pypto_serving.kernels import runnable


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler, so no kernels")
def test_a_machine_with_a_compiler_has_kernels() -> None:
    assert "portable" in runnable()
