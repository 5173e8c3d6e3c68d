"""Tiers below the device: the same answers under any schedule of stores, loads, evictions and deaths."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pypto_serving.backend.null.program import NullBackend
from pypto_serving.kv.lower_tier import LowerTier
from pypto_serving.model.null_models import plain_groups
from pypto_serving.store.disk import DiskStore
from pypto_serving.store.slab import stride_of
from pypto_serving.types.request import ClearCache, TierStats
from pypto_serving.types.tier import TierConfig
from tests.kv.tiered import GROUP_SETS, hits, prompt, tiered
from tests.simulation import Simulation, null_config


def lower(simulation: Simulation, index: int = 0) -> LowerTier:
    return simulation.core.scheduler.kv.tiers.tiers[index]


def lower_stats(simulation: Simulation) -> TierStats:
    return simulation.core.scheduler.kv.tiers.stats()[0]


def churn(simulation: Simulation, rng: random.Random, num_requests: int, deaths: float, aborts: float) -> None:
    """Random traffic with random delays; then every answer must be the oracle's."""
    executor = simulation.executor
    executor.delay = lambda: rng.choice((0, 0, 1, 3, 9))
    executor.die_if = lambda plan: rng.random() < deaths and executor.num_deaths < 2  # at the third a request fails
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


def test_a_disk_with_room_for_some_slots_keeps_what_was_used_last(tmp_path: Path) -> None:
    tiers = (TierConfig(tier="disk", size_bytes=0, num_slots=(200,)),)
    simulation = Simulation(null_config(plain_groups(16), (24,), tiers=tiers, max_model_len=320))
    program = NullBackend(simulation.config).prepare(lambda phase, done, total: None)
    sizes = program.memory.block_bytes
    room = 40 * stride_of(sizes[0])
    store = simulation.executor.stores["disk"] = DiskStore(tmp_path, b"", sizes, (200,), room)
    rng = random.Random(2)
    prompts = [[rng.randrange(1000) for _ in range(160)] for _ in range(20)]
    tier, writable = lower(simulation), []
    for tokens in prompts:
        simulation.add(tokens)
        simulation.run()
        simulation.clock.advance(60.0)
        writable.append(lower_stats(simulation).writable)
    assert tier.counters.failed_blocks > 0
    num_before = writable.index(False)
    assert num_before > 0 and not any(writable[num_before:]), "also while slots that were used before are used again"
    again = simulation.add([*prompts[-3], 1, 2, 3])
    simulation.run()
    simulation.assert_correct(again)
    device, _, disk, _ = simulation.last[again].cached_by_tier
    assert device + disk == 160 and disk > 100
    store.close()


@pytest.mark.thinned(1)
@pytest.mark.parametrize("kind", GROUP_SETS)
@pytest.mark.parametrize("policy", ["through", "eviction"])
def test_any_schedule_gives_the_same_answers(kind: str, policy: str) -> None:
    rng = random.Random(f"{kind} {policy}")
    simulation = tiered(
        kind, kv_store=policy, depth=rng.choice((1, 2, 3)), max_num_batched_tokens=rng.choice((16, 64, 300))
    )
    churn(simulation, rng, num_requests=40, deaths=rng.choice((0.0, 0.02)), aborts=0.1)


@pytest.mark.parametrize("kind", GROUP_SETS)
def test_the_schedules_meet_hits_in_every_tier(kind: str) -> None:
    simulation = tiered(kind)
    churn(simulation, random.Random(kind), num_requests=120, deaths=0.0, aborts=0.0)
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


@pytest.mark.thinned(1)
@pytest.mark.parametrize("kind", GROUP_SETS)
@pytest.mark.parametrize("host", [False, True])
def test_restarts_over_a_disk_give_the_same_answers(kind: str, host: bool, memory_disk: Path) -> None:
    rng, found = random.Random(f"{kind} {host} disk"), 0
    for _ in range(3):
        simulation = tiered(kind, memory_disk, host, depth=rng.choice((1, 2, 3)))
        churn(simulation, rng, num_requests=25, deaths=0.01, aborts=0.1)
        found += hits(simulation)["disk"]
        simulation.executor.stop()
    assert found > 0


def test_a_preempted_request_resumes_from_two_tiers_and_takes_one_victim_at_a_time(memory_disk: Path) -> None:
    simulation = tiered("plain", memory_disk, max_num_batched_tokens=64)
    rng = random.Random(5)
    for _ in range(4):
        simulation.add([rng.randrange(1000) for _ in range(70)], max_tokens=120)
    simulation.run()
    assert 0 < simulation.counters.num_preemptions <= 6
    assert lower(simulation).counters.loaded_blocks > 0
    for request_id in simulation.prompts:
        simulation.assert_correct(request_id)
    simulation.executor.stop()


def test_with_policy_eviction_only_what_is_about_to_be_evicted_is_stored() -> None:
    simulation = tiered("plain", kv_store="eviction")
    rng = random.Random(6)
    simulation.add([rng.randrange(1000) for _ in range(200)])
    simulation.run()
    assert lower(simulation).counters.stored_blocks == 0
    for _ in range(3):
        simulation.add([rng.randrange(1000) for _ in range(60)])
        simulation.run()
    counters = lower(simulation).counters
    assert 0 < counters.stored_blocks <= 10, "the device lacked a few blocks only"
    assert counters.lost_blocks == 0


def test_requests_do_not_wait_for_a_tier_that_is_stuck() -> None:
    simulation = tiered("plain", max_model_len=320)
    rng = random.Random(7)
    first = [rng.randrange(1000) for _ in range(160)]
    for tokens in (first, *([rng.randrange(1000) for _ in range(200)] for _ in range(3))):
        simulation.add(tokens)
        simulation.run()
    simulation.executor.is_stuck = lambda job: True
    waiting = [simulation.add([*first, i]) for i in range(3)]
    for _ in range(40):
        simulation.turn()
        simulation.clock.advance(1.0)
    assert all(simulation.last[request_id].cached_by_tier[1] == 0 for request_id in waiting)
    assert lower(simulation).stuck
    simulation.executor.is_stuck = lambda job: False
    simulation.run()
    assert not lower(simulation).stuck
    for request_id in waiting:
        simulation.assert_correct(request_id)


def test_a_clear_is_not_lost_with_a_worker(tmp_path: Path) -> None:
    simulation = tiered("plain", tmp_path, host=False)
    simulation.add(list(range(100)))
    simulation.run()
    assert lower_stats(simulation).held_blocks == 6
    simulation.client.send(ClearCache(("device", "disk")))
    simulation.executor.is_stuck = lambda job: True
    simulation.turn()
    simulation.executor.die_if = lambda plan: True
    simulation.add(list(range(100)))
    simulation.turn()
    simulation.turn()
    simulation.executor.die_if = simulation.executor.is_stuck = lambda _: False
    simulation.run()
    assert simulation.executor.num_deaths == 1
    assert all(output.num_cached_tokens == 0 for output in simulation.last.values())
    simulation.executor.stop()
    again = tiered("plain", tmp_path, host=False)
    again.turn()
    assert lower_stats(again).held_blocks == 6, "only what was stored after the clear"
    again.executor.stop()


@pytest.mark.parametrize("preempted", [False, True])
def test_stores_that_hang_leave_room_for_the_longest_request(preempted: bool) -> None:
    """Every job that stores may be the last one: what all of them hold is bounded, that of preempted requests too."""
    simulation = tiered("plain", max_model_len=320, max_num_batched_tokens=320)
    simulation.executor.is_stuck = lambda job: job.kind == "store"
    rng = random.Random(8)

    def finish() -> None:
        for _ in range(1000):
            simulation.turn()
            simulation.clock.advance(0.1)
        assert simulation.last.keys() == simulation.prompts.keys()

    for _ in range(4):
        simulation.add([rng.randrange(1000) for _ in range(100)], max_tokens=100 if preempted else 2)
    finish()
    assert (simulation.counters.num_preemptions > 0) == preempted
    assert simulation.core.scheduler.kv.tiers.transfers.num_bytes(lower(simulation), "store") > 0
    longest = simulation.add([rng.randrange(1000) for _ in range(310)], max_tokens=10)
    finish()
    simulation.assert_correct(longest)
    simulation.executor.is_stuck = lambda job: False
    simulation.run()


def test_a_load_that_hangs_and_holds_the_pool_costs_the_worker_and_no_request() -> None:
    """Its prefix takes more than the room beside the longest sequence. The next worker goes without the tier."""
    tiers = (TierConfig(tier="host", size_bytes=0, num_slots=(64,)),)
    simulation = Simulation(null_config(num_blocks=18, tiers=tiers, max_num_seqs=4))
    rng = random.Random(9)
    first, *others = ([rng.randrange(1000) for _ in range(240)] for _ in range(3))

    def answer(tokens: list[int]) -> tuple[int, ...]:
        request_id = simulation.add(tokens, max_tokens=4)
        for _ in range(500):
            simulation.turn()
            simulation.clock.advance(0.05)
        simulation.assert_correct(request_id)
        simulation.core.check()
        return simulation.last[request_id].cached_by_tier

    answer(first)
    answer(others[0])
    simulation.executor.is_stuck = lambda job: job.kind == "load"
    assert answer(first) == (0, 0, 0, 0)
    assert simulation.executor.num_deaths == 1
    assert lower(simulation).left_out and not lower_stats(simulation).writable
    simulation.client.send(ClearCache(("host",)))
    for tokens in (*others, first):
        answer(tokens)
    assert simulation.executor.num_deaths == 1, "what hung is not used"
    simulation.executor.die_if = lambda plan: simulation.executor.num_deaths == 1
    simulation.executor.is_stuck = lambda job: False
    for tokens in (first, *others):
        answer(tokens)
    assert answer(first) == (0, 224, 0, 0), "the worker after has the tier again"
    simulation.run()


def below_the_device(prompts: list[list[int]]) -> Simulation:
    """A simulation whose host tier alone holds these prompts."""
    tiers = (TierConfig(tier="host", size_bytes=0, num_slots=(1000,)),)
    simulation = Simulation(
        null_config(plain_groups(16), 1000, tiers=tiers, max_num_seqs=100, max_num_batched_tokens=2000)
    )
    for tokens in prompts:
        simulation.add(tokens)
    simulation.run()
    simulation.client.send(ClearCache(("device",)))
    simulation.turn()
    return simulation


def test_every_request_whose_prefix_is_below_the_device_loads_it() -> None:
    """Also with more of them than may load at once: the others wait, as loading is faster than computing."""
    prompts = [[i, *range(50)] for i in range(80)]
    simulation = below_the_device(prompts)
    simulation.executor.delay = lambda: 3
    again = [simulation.add(tokens) for tokens in prompts]
    simulation.run()
    assert {simulation.last[request_id].cached_by_tier for request_id in again} == {(0, 48, 0, 0)}


@pytest.mark.parametrize("shared", [False, True])
def test_loads_that_hang_delay_nobody_for_long(shared: bool) -> None:
    """More of them than may load at once. Of a tier that others fill too, every request asks what it holds."""
    prompts = [[i, *range(50)] for i in range(40)]
    simulation = below_the_device(prompts)
    lower(simulation).shared = shared
    simulation.executor.is_stuck = lambda job: True

    def wait_for(*request_ids: str) -> float:
        """Time until requests have ended, while that of steps passes, or 10 ms where there is none."""
        start_s = simulation.clock.now()
        while not simulation.last.keys() >= set(request_ids):
            simulation.turn()
            simulation.clock.advance(0.01)
            assert simulation.clock.now() < start_s + 100
        simulation.core.check()
        return simulation.clock.now() - start_s

    again = [simulation.add(tokens) for tokens in prompts]
    assert wait_for(simulation.add(range(500, 540), max_tokens=1)) < 2.5
    assert wait_for(*again[32:]) < 2.5, "no load ends, so those whose turn has not come compute"
    assert wait_for(*again) < 20
    assert lower(simulation).stuck
    assert wait_for(*(simulation.add([*tokens, 1]) for tokens in prompts)) < 4, "a stuck tier is not asked"
    for request_id in simulation.prompts:
        simulation.assert_correct(request_id)
