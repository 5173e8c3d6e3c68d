"""Every kernel test runs once for each instruction set of this machine."""

from __future__ import annotations

import pytest

from pypto_serving.kernels import Engine, runnable
from tests.kernels.stage import engine_of


@pytest.fixture(scope="session", params=runnable())
def instruction_set(request: pytest.FixtureRequest) -> str:
    return str(request.param)


ENGINES = [*((name, 3) for name in runnable()[:-1] or runnable()), *((name, 1) for name in runnable()[-1:])]


@pytest.fixture(scope="session", params=ENGINES, ids=lambda each: f"{each[0]}-{each[1]}")
def engine(request: pytest.FixtureRequest) -> Engine:
    """Kernels on three threads, which may be more than there are CPUs, and those of any CPU on one."""
    return engine_of(*request.param)
