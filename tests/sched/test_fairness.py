"""Fair scheduling: cache salts share the tokens, whatever they ask for."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulation import Simulation, null_config
from tests.thinning import examples


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


def fair(**changes: Any) -> Simulation:
    return Simulation(null_config(**({"fair_scheduling": True, "max_num_seqs": 2, "num_blocks": 200} | changes)))


def run_all(simulation: Simulation) -> None:
    simulation.run()
    for request_id in simulation.prompts:
        simulation.assert_correct(request_id)
    shares = simulation.core.scheduler._registry.shares
    assert shares is None or len(shares) == 0


@pytest.mark.parametrize("on", [False, True])
def test_a_burst_of_one_salt_does_not_delay_another(on: bool) -> None:
    simulation = fair(fair_scheduling=on)
    burst = [simulation.add(prompt(20, i), max_tokens=20, cache_salt="a") for i in range(40)]
    for _ in range(30):
        simulation.turn()
    late = [simulation.add(prompt(20, 100 + i), max_tokens=20, cache_salt="b") for i in range(3)]
    run_all(simulation)
    order = list(simulation.last)
    before = sum(order.index(request_id) < order.index(late[0]) for request_id in burst)
    assert (before < 6) == on


def test_salts_get_the_same_tokens_however_long_their_requests_are() -> None:
    """Both ask for more than there is, one of them in requests of four times the length."""
    simulation = fair()
    for i in range(60):
        simulation.add(prompt(20, i), max_tokens=10, cache_salt="short")
    for i in range(15):
        simulation.add(prompt(80, 100 + i), max_tokens=40, cache_salt="long")
    for _ in range(400):
        simulation.turn()
    scheduler = simulation.core.scheduler
    assert scheduler._registry.shares is not None and scheduler.num_waiting > 10
    short, long = scheduler._registry.shares["short"], scheduler._registry.shares["long"]
    assert short + long > 1000 and abs(short - long) <= 2 * 120
    run_all(simulation)


def test_a_salt_that_asked_for_nothing_has_no_claim() -> None:
    """It shares from now on, instead of being served alone until it has caught up."""
    simulation = fair()
    for i in range(30):
        simulation.add(prompt(40, i), max_tokens=20, cache_salt="a")
    for _ in range(200):
        simulation.turn()
    ended = len(simulation.last)
    for i in range(30):
        simulation.add(prompt(40, 100 + i), max_tokens=20, cache_salt="b")
    while len(simulation.last) < ended + 16:
        simulation.turn()
    salts = [simulation.requests[r].cache_salt for r in list(simulation.last)[ended:]]
    assert 6 <= salts.count("a") <= 10
    run_all(simulation)


def test_priority_goes_before_fairness() -> None:
    simulation = fair(max_num_seqs=1)
    first = simulation.add(prompt(20, 0), cache_salt="a")
    simulation.turn()
    low = simulation.add(prompt(20, 1), cache_salt="b", priority=1)
    high = simulation.add(prompt(20, 2), cache_salt="a", priority=0)
    run_all(simulation)
    assert list(simulation.last) == [first, high, low]


@examples(20)
@given(seed=st.integers(0, 10**6), depth=st.integers(1, 2))
def test_random_traffic_of_salts(seed: int, depth: int) -> None:
    """Preemptions, shared prefixes, aborts, deadlines and deaths: every answer is right, and no salt is remembered."""
    rng = random.Random(seed)
    simulation = fair(num_blocks=24, max_num_seqs=4, depth=depth)
    simulation.executor.die_if = lambda plan: rng.random() < 0.03 and simulation.executor.num_deaths < 2
    trunk = prompt(120, seed)
    for _ in range(rng.randrange(2, 20)):
        tokens = trunk[: rng.randrange(120)] + prompt(rng.randrange(1, 40), rng.randrange(100))
        deadline_s = simulation.clock.now() + rng.random() * 3 if rng.random() < 0.2 else None
        salt = rng.choice("aabc")
        simulation.add(tokens, max_tokens=rng.randrange(1, 30), cache_salt=salt, deadline_s=deadline_s)
        for _ in range(rng.randrange(4)):
            simulation.turn()
            simulation.core.check()
        if rng.random() < 0.1:
            simulation.abort(rng.choice(list(simulation.prompts)))
    run_all(simulation)
