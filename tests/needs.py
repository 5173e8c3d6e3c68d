"""What some tests need that a machine may lack; CONTRIBUTING.md lists all of it."""

from __future__ import annotations

import pytest

from pypto_serving.kernels import runnable

needs_kernels = pytest.mark.skipif(
    not runnable(), reason="no kernels: install a C++20 compiler, such as Debian's package g++, then run make build"
)
