"""Tiers below the device: the same answers under any schedule of stores, loads, evictions and deaths."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pypto_serving.backend.null import deepseek_v4_groups, plain_groups
from pypto_serving.types.kv import KVCacheGroupSpec, KVTensorSpec
from pypto_serving.types.tier import TIERS, TierConfig
from tests.simulation import Simulation, null_config


def small_groups() -> tuple[KVCacheGroupSpec, ...]:
    """Every kind of group, in blocks of a few tokens."""

    def row(ratio: int = 1, folded_from: str = "") -> tuple[KVTensorSpec, ...]:
        tensor = KVTensorSpec(
            name="t", layers=(0,), dtype="float32", row_shape=(8,), ratio=ratio, folded_from=folded_from
        )
        return (tensor,)

    return (
        KVCacheGroupSpec(name="full", kind="full", block_size=8, tensors=row()),
        KVCacheGroupSpec(name="window", kind="sliding_window", block_size=8, window=12, tensors=row()),
        KVCacheGroupSpec(name="cmp", kind="compressed", block_size=8, tensors=row(4, "state")),
        KVCacheGroupSpec(name="state", kind="rolling_state", block_size=4, period=4, overlap=4, tensors=row()),
    )


GROUP_SETS: dict[str, tuple[tuple[KVCacheGroupSpec, ...], tuple[int, ...], tuple[int, ...]]] = {
    "plain": (plain_groups(), (24,), (48,)),
    "all kinds": (small_groups(), (48, 40, 48, 70), (60, 20, 60, 20)),
    "deepseek_v4": (deepseek_v4_groups(), (9, 6, 6, 60, 70, 70), (12, 12, 12, 1, 12, 12)),
}


def tiered(kind: str, **changes: Any) -> Simulation:
    groups, num_blocks, num_slots = GROUP_SETS[kind]
    tiers = (TierConfig(tier="host", size_bytes=0, num_slots=num_slots),)
    return Simulation(null_config(groups, num_blocks, tiers=tiers, max_num_seqs=5, **changes))


def hits(simulation: Simulation) -> dict[str, int]:
    """Cached tokens by tier, over all requests."""
    totals = [0] * len(TIERS)
    for output in simulation.last.values():
        for i, count in enumerate(output.cached_by_tier):
            totals[i] += count
    return dict(zip(TIERS, totals, strict=True))


def prompt(rng: random.Random, families: int = 4, longest: int = 200) -> list[int]:
    """A prompt that shares a prefix of random length with others of its family."""
    family = random.Random(rng.randrange(families))
    shared = [family.randrange(1000) for _ in range(longest)][: rng.randrange(0, longest)]
    return [*shared, *(rng.randrange(1000) for _ in range(rng.randrange(1, 40)))]


def churn(simulation: Simulation, rng: random.Random, num_requests: int, deaths: float, aborts: float) -> None:
    """Random traffic with random delays; then every answer must be the oracle's."""
    executor = simulation.executor
    executor.delay = lambda: rng.choice((0, 0, 1, 3, 9))
    executor.die_if = lambda plan: rng.random() < deaths
    aborted = set()
    for _ in range(num_requests):
        request_id = simulation.add(prompt(rng), max_tokens=rng.randrange(1, 30))
        for _ in range(rng.randrange(0, 12)):
            simulation.turn()
        simulation.core.check()
        if rng.random() < aborts:
            aborted.add(request_id)
            simulation.abort(request_id)
    executor.die_if = lambda plan: False
    simulation.run()
    for request_id, output in simulation.last.items():
        assert output.finish_reason in ("length", "abort"), output.fault
        simulation.assert_correct(request_id)
        assert request_id in aborted or output.finish_reason == "length"


def test_a_prefix_evicted_from_the_device_comes_back_from_host_memory() -> None:
    simulation = tiered("plain", max_model_len=320)
    rng = random.Random(1)
    first = [rng.randrange(1000) for _ in range(160)]
    simulation.add(first)
    simulation.run()
    for _ in range(3):
        simulation.add([rng.randrange(1000) for _ in range(200)])
        simulation.run()
    again = simulation.add([*first, 1, 2, 3])
    simulation.run()
    simulation.assert_correct(again)
    assert simulation.last[again].cached_by_tier == (0, 160, 0, 0)
    assert simulation.last[again].num_cached_tokens == 160


@pytest.mark.parametrize("kind", GROUP_SETS)
@pytest.mark.parametrize("policy", ["through", "eviction"])
@pytest.mark.parametrize("seed", range(4))
def test_any_schedule_gives_the_same_answers(kind: str, policy: str, seed: int) -> None:
    rng = random.Random(f"{kind} {policy} {seed}")
    simulation = tiered(
        kind, kv_store=policy, depth=rng.choice((1, 2, 3)), max_num_batched_tokens=rng.choice((16, 64, 300))
    )
    churn(simulation, rng, num_requests=40, deaths=rng.choice((0.0, 0.02)), aborts=0.1)


@pytest.mark.parametrize("kind", GROUP_SETS)
def test_the_schedules_meet_hits_in_every_tier(kind: str) -> None:
    simulation = tiered(kind)
    churn(simulation, random.Random(kind), num_requests=80, deaths=0.0, aborts=0.0)
    found = hits(simulation)
    assert found["device"] > 0 and found["host"] > 0, found
    assert simulation.counters.num_preemptions > 0


def test_requests_with_loaded_blocks_do_not_lock_each_other_out() -> None:
    """Several waiting requests held what was loaded for them, and none of them had room for the rest."""
    rng = random.Random("plain eviction 13 x")
    simulation = tiered(
        "plain", kv_store="eviction", depth=rng.choice((1, 2, 3)), max_num_batched_tokens=rng.choice((16, 64, 300))
    )
    churn(simulation, rng, num_requests=30, deaths=rng.choice((0.0, 0.02)), aborts=0.1)


@pytest.mark.soak
@pytest.mark.parametrize("kind", GROUP_SETS)
@pytest.mark.parametrize("policy", ["through", "eviction"])
def test_a_thousand_schedules(kind: str, policy: str) -> None:
    for seed in range(400):
        rng = random.Random(f"{kind} {policy} {seed} soak")
        simulation = tiered(
            kind, kv_store=policy, depth=rng.choice((1, 2, 3)), max_num_batched_tokens=rng.choice((16, 64, 300))
        )
        churn(simulation, rng, num_requests=30, deaths=rng.choice((0.0, 0.02)), aborts=0.1)
