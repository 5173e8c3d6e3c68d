"""Every kernel test runs once for each instruction set of this machine."""

from __future__ import annotations

import pytest

from pypto_serving.kernels import Engine, runnable
from tests.kernels.stage import engine_of


@pytest.fixture(scope="session", params=runnable())
def instruction_set(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session", params=[1, 3])
def engine(request: pytest.FixtureRequest, instruction_set: str) -> Engine:
    """Kernels on one thread and on three, which may be more than there are CPUs."""
    return engine_of(instruction_set, request.param)
