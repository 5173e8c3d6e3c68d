"""How often a child is started again."""

from __future__ import annotations

from pypto_serving.engine.respawns import RespawnLimit
from pypto_serving.types.config import FaultConfig

FAULTS = FaultConfig(max_deaths=5, deaths_window_s=100)


def test_deaths_in_a_row_are_bounded() -> None:
    deaths = RespawnLimit("it", 2, FAULTS)
    assert [deaths.count_death(0), deaths.count_death(1)] == [None, None]
    assert deaths.count_death(2) == "it died 3 times without completing a step"
    deaths.count_step()
    assert deaths.count_death(3) is None


def test_deaths_within_a_window_are_bounded_whatever_happens_in_between() -> None:
    deaths = RespawnLimit("it", 2, FAULTS)
    for now_s in range(5):
        assert deaths.count_death(now_s) is None
        deaths.count_step()
    assert deaths.count_death(99) == "it died 6 times within 100 s"


def test_rare_deaths_and_deaths_with_another_cause_do_not_add_up() -> None:
    deaths = RespawnLimit("it", 2, FAULTS)
    for i in range(40):
        assert deaths.count_death(25 * i) is None
        deaths.count_step()
    for _ in range(10):
        assert [deaths.count_death(2000), deaths.count_death(2000)] == [None, None]
        deaths.forgive_deaths()
