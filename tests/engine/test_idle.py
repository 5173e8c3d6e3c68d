"""An idle core looks for leaks once after whatever may have made some, not at every heartbeat."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pypto_serving.types.request import ClearCache
from tests.kv.tiered import tiered
from tests.simulation import Simulation


@pytest.fixture
def simulation() -> Simulation:
    return tiered("plain")


def count_checks(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often the core checks all owners in ten heartbeats."""
    found: list[float] = []
    check = simulation.core.check

    def counted() -> None:
        found.append(simulation.clock.now())
        check()

    monkeypatch.setattr(simulation.core, "check", counted)

    def count() -> int:
        found.clear()
        for _ in range(10):
            simulation.clock.advance(1.0)
            simulation.turn()
        return len(found)

    return count


def test_an_idle_core_checks_once_after_a_change(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = count_checks(simulation, monkeypatch)
    assert checks() == 1, "a worker has said hello"
    assert checks() == 0
    simulation.add(range(100))
    simulation.run()
    assert checks() == 1
    assert checks() == 0
    simulation.client.send(ClearCache(("device", "host")))
    assert checks() >= 1
    assert checks() == 0


def test_a_transfer_that_ends_is_a_change(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = count_checks(simulation, monkeypatch)
    simulation.executor.is_stuck = lambda job: True
    simulation.add(range(100))
    while not simulation.last:
        simulation.turn()
    checks()
    simulation.executor.is_stuck = lambda job: False
    assert checks() >= 1
    assert checks() == 0
