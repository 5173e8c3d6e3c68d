"""The CUDA program in whole engines, on the fake device: the same tokens, however they are computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypto_serving.types.sampling import SamplingParams
from pypto_serving.types.tier import TierConfig
from tests.backend.cuda.programs import hash_config, simulate
from tests.simulation import Simulation
from tests.thinning import examples

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=6, temperature=0.9, ignore_eos=True)
LENGTHS = (5, 70, 100, 1, 64, 33, 2, 17, 8, 9)


def prompt_of(seed: int, length: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, 97, length).tolist()
    return found


REQUESTS = [(prompt_of(i, length), DRAWN if i % 2 else GREEDY) for i, length in enumerate(LENGTHS)]


def add_all(simulation: Simulation, requests: Sequence[tuple[list[int], SamplingParams]] = REQUESTS) -> list[str]:
    return [simulation.add(prompt, params=params, seed=17 + i) for i, (prompt, params) in enumerate(requests)]


def answers(config: Any) -> list[list[int]]:
    """What the requests get that run together."""
    simulation = simulate(config)
    names = add_all(simulation)
    simulation.run()
    return [simulation.tokens[name] for name in names]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """What each request gets when no other one runs, in an engine that holds one step at a time."""
    simulation = simulate(hash_config(depth=1))
    found = []
    for i, (prompt, params) in enumerate(REQUESTS):
        name = simulation.add(prompt, params=params, seed=17 + i)
        simulation.run()
        found.append(simulation.tokens[name])
    assert len({tuple(tokens) for tokens in found}) == len(found)
    return found


@pytest.mark.parametrize(("depth", "budget"), [(1, 24), (2, 9), (3, 96), (3, 9)])
def test_neighbours_chunks_and_steps_in_flight_change_no_token(alone: list[list[int]], depth: int, budget: int) -> None:
    assert answers(hash_config(depth=depth, max_num_batched_tokens=budget)) == alone


def test_preemption_changes_no_token() -> None:
    params = SamplingParams(max_tokens=24, temperature=0.9, ignore_eos=True)
    requests = [(prompt_of(50 + i, 9 + i), params) for i in range(6)]
    found = []
    for num_blocks in (60, 17):
        simulation = simulate(hash_config(num_blocks=(num_blocks,)))
        names = add_all(simulation, requests)
        simulation.run()
        assert (simulation.counters.num_preemptions > 0) is (num_blocks == 17)
        found.append([simulation.tokens[name] for name in names])
    assert found[0] == found[1]


def test_prefixes_from_host_memory_change_no_token(alone: list[list[int]]) -> None:
    tier = TierConfig(tier="host", size_bytes=1 << 20, num_slots=(200,))
    simulation = simulate(hash_config(tiers=(tier,), num_blocks=(20,)))
    for _ in range(3):
        names = add_all(simulation)
        simulation.run()
        assert [simulation.tokens[name] for name in names] == alone
    (host,) = simulation.core.scheduler.kv.tiers.tiers
    assert host.counters.hit_tokens > 0


@examples(5)
@given(st.integers(0, 2**32 - 1))
def test_deaths_of_the_worker_change_no_token(alone: list[list[int]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    tier = TierConfig(tier="host", size_bytes=1 << 20, num_slots=(200,))
    simulation = simulate(hash_config(tiers=(tier,), depth=int(rng.integers(1, 4)), num_blocks=(30,)))
    simulation.executor.die_if = lambda plan: rng.random() < 0.04
    simulation.executor.delay = lambda: int(rng.integers(0, 3))
    names = []
    for i, (prompt, params) in enumerate(REQUESTS):
        names.append(simulation.add(prompt, params=params, seed=17 + i))
        for _ in range(int(rng.integers(0, 6))):
            simulation.turn()
    simulation.run()
    answered = [name for name in names if simulation.last[name].finish_reason == "length"]
    assert len(answered) >= len(names) - simulation.executor.num_deaths
    for name, wanted in zip(names, alone, strict=True):
        if name in answered:
            assert simulation.tokens[name] == wanted
