"""Requests wait for a prefix that another is computing: each block is computed once, and no wait is for ever."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypto_serving.model.null_models import deepseek_v4_groups, plain_groups
from pypto_serving.sched import admission
from pypto_serving.types.arrays import unpack_ids
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.kv import resume_step
from pypto_serving.types.step import StepPlan
from tests.simulation import Simulation, null_config
from tests.thinning import examples


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


def large(**changes: object) -> EngineConfig:
    return null_config(**({"num_blocks": 2000, "max_model_len": 1024, "depth": 2} | changes))


def slow(**changes: object) -> EngineConfig:
    """One prompt cannot take the whole budget, so that others are looked at while it is computed."""
    return large(**({"max_num_batched_tokens": 64, "long_prefill_token_threshold": 32} | changes))


def computed(simulation: Simulation) -> int:
    """Number of tokens computed by all steps."""
    return sum(int(unpack_ids(plan.num_tokens).sum()) for plan in simulation.executor.plans)


def run_all(simulation: Simulation) -> None:
    simulation.run()
    for request_id in simulation.prompts:
        simulation.assert_correct(request_id)


def needed(simulation: Simulation) -> int:
    """Tokens to compute if each block is computed once: distinct blocks, the rest of each prompt, and decodes."""
    size = resume_step(simulation.config.cache.groups)
    blocks, rest = set(), 0
    for request_id, tokens in simulation.prompts.items():
        whole = (len(tokens) - 1) // size * size
        blocks |= {tuple(tokens[:end]) for end in range(size, whole + 1, size)}
        rest += len(tokens) - whole + len(simulation.tokens[request_id]) - 1
    return len(blocks) * size + rest


@pytest.mark.parametrize("budget", [64, 512, 8192])
@pytest.mark.parametrize("depth", [1, 2])
def test_choices_of_one_prompt_pay_once(budget: int, depth: int) -> None:
    simulation = Simulation(large(max_num_batched_tokens=budget, depth=depth))
    for _ in range(16):
        simulation.add(prompt(480), max_tokens=9)
    run_all(simulation)
    assert computed(simulation) == needed(simulation) == 480 + 15 * 16 + 16 * 8


def test_nobody_waits_without_prefix_caching_or_across_cache_salts() -> None:
    for config, salts in ((large(enable_prefix_caching=False), [""] * 4), (large(), list("abcd"))):
        simulation = Simulation(config)
        for salt in salts:
            simulation.add(prompt(40), max_tokens=2, cache_salt=salt)
        for _ in range(3):
            simulation.turn()
        assert simulation.core.scheduler.num_running == 4
        run_all(simulation)
        assert computed(simulation) == 4 * 41


def test_requests_behind_one_that_waits_go_on() -> None:
    simulation = Simulation(slow(max_num_seqs=2))
    same = [simulation.add(prompt(400), max_tokens=1) for _ in range(2)]
    others = [simulation.add(prompt(8, i), max_tokens=2) for i in range(1, 4)]
    run_all(simulation)
    assert list(simulation.last) == [*others, *same]


def test_a_request_waits_only_until_its_prompt_differs() -> None:
    """The leader goes on for long after the common prefix is computed."""
    simulation = Simulation(slow())
    common = prompt(32)
    long = simulation.add(common + prompt(900, 1), max_tokens=1)
    short = simulation.add(common + prompt(8, 2), max_tokens=2)
    run_all(simulation)
    assert list(simulation.last) == [short, long]
    assert simulation.last[short].num_cached_tokens == 32


def test_a_more_important_request_waits_for_nobody() -> None:
    simulation = Simulation(slow())
    simulation.add(prompt(600), max_tokens=1, priority=1)
    for _ in range(3):
        simulation.turn()
    simulation.add(prompt(600), max_tokens=1, priority=0)
    simulation.turn()
    assert simulation.core.scheduler.num_running == 2
    run_all(simulation)
    assert computed(simulation) > needed(simulation)


End = Callable[[Simulation, str], None]


def abort(simulation: Simulation, request_id: str) -> None:
    simulation.abort(request_id)


def die(simulation: Simulation, request_id: str) -> None:
    deaths = simulation.executor.num_deaths
    simulation.executor.die_if = lambda plan: simulation.executor.num_deaths == deaths


def clear(simulation: Simulation, request_id: str) -> None:
    simulation.core.scheduler.kv.clear(("device",))


@pytest.mark.parametrize("end", [abort, die, clear])
def test_the_end_of_the_leader_ends_the_waiting(end: End) -> None:
    simulation = Simulation(slow())
    leader = simulation.add(prompt(600), max_tokens=2)
    followers = [simulation.add(prompt(600), max_tokens=2) for _ in range(5)]
    for _ in range(8):
        simulation.turn()
    assert (simulation.core.scheduler.num_running, simulation.core.scheduler.num_waiting) == (1, 5)
    end(simulation, leader)
    run_all(simulation)
    assert [len(simulation.tokens[r]) for r in followers] == [2] * 5
    assert computed(simulation) < 3 * 600


def test_followers_end_by_abort_and_by_deadline() -> None:
    simulation = Simulation(slow())
    leader = simulation.add(prompt(600), max_tokens=2)
    aborted = simulation.add(prompt(600))
    late = simulation.add(prompt(600), deadline_s=simulation.clock.now() + 0.2)
    for _ in range(4):
        simulation.turn()
    assert len(simulation.core.scheduler._registry.prefix_wait) == 2
    simulation.abort(aborted)
    for _ in range(10):
        simulation.turn()
    assert late in simulation.last and leader not in simulation.last
    fault = simulation.last[late].fault
    assert fault is not None and fault.code == "deadline_exceeded"
    simulation.run()
    assert len(simulation.tokens[leader]) == 2


def test_a_row_that_fails_leaves_its_followers_to_others() -> None:
    """What the failed row published is forgotten, so the next request computes all of it."""
    answer = Simulation(large())
    failing = answer.add(prompt(100), max_tokens=1)
    answer.run()
    options = {"fails_on": answer.tokens[failing][0], "seconds_per_step": 0.01, "seconds_per_token": 0.001}
    simulation = Simulation(large(backend_options=options))
    bad = simulation.add(prompt(100), max_tokens=4)
    good = [simulation.add(prompt(100) + prompt(10, i), max_tokens=1) for i in range(1, 4)]
    run_all(simulation)
    assert simulation.last[bad].finish_reason == "error"
    assert all(simulation.last[r].finish_reason is not None for r in good)


def test_followers_stop_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, and however few a step looks at, others start while their leader is computed."""
    monkeypatch.setattr(admission, "MAX_SET_ASIDE", 3)
    simulation = Simulation(slow())
    same = [simulation.add(prompt(900), max_tokens=1) for _ in range(13)]
    last = simulation.add(prompt(8, 1), max_tokens=2)
    for _ in range(3):
        simulation.turn()
    assert len(simulation.core.scheduler._registry.prefix_wait) < 12, "a step looks at a few"
    first = simulation.add(prompt(8, 2), max_tokens=2, priority=-5)
    while not {first, last} <= simulation.last.keys():
        simulation.turn()
        simulation.core.check()
    assert len(simulation.core.scheduler._registry.prefix_wait) == 12 and not simulation.last.keys() & set(same)
    assert len(simulation.executor.plans) < 16, "of 29 for the whole prompt"
    run_all(simulation)
    assert computed(simulation) == needed(simulation)


def tree(rng: random.Random, num_requests: int, longest: int) -> list[list[int]]:
    """Prompts that branch off from each other at random places."""
    prompts = [prompt(rng.randrange(1, longest), rng.random().__hash__())]
    while len(prompts) < num_requests:
        trunk = rng.choice(prompts)
        tail = prompt(rng.choice([0, 1, rng.randrange(1, 100)]), rng.random().__hash__())
        prompts.append((trunk[: rng.randrange(len(trunk) + 1)] + tail)[: longest - 1] or [1])
    return prompts


GROUPS = {"plain": (plain_groups(16), 2000), "deepseek_v4": (deepseek_v4_groups(), 2000)}


@examples(25)
@given(
    kind=st.sampled_from(sorted(GROUPS)),
    depth=st.integers(1, 3),
    budget=st.sampled_from([7, 64, 500]),
    threshold=st.sampled_from([0, 50]),
    seed=st.integers(0, 10**6),
)
def test_every_block_is_computed_once(kind: str, depth: int, budget: int, threshold: int, seed: int) -> None:
    """With blocks enough for all: whatever branches off from what, and whenever it arrives."""
    rng = random.Random(seed)
    groups, num_blocks = GROUPS[kind]
    config = large(
        groups=groups,
        num_blocks=num_blocks,
        depth=depth,
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=threshold,
        max_num_seqs=rng.randrange(1, 17),
    )
    simulation = Simulation(config)
    for tokens in tree(rng, rng.randrange(2, 14), 500):
        simulation.add(tokens, max_tokens=rng.randrange(1, 6))
        for _ in range(rng.choice([0, 0, 0, 1, 5])):
            simulation.turn()
    run_all(simulation)
    assert simulation.counters.num_preemptions == 0
    assert computed(simulation) <= needed(simulation)


SMALL_POOLS = {"plain": (plain_groups(16), (24,)), "deepseek_v4": (deepseek_v4_groups(), (8, 6, 6, 60, 60, 60))}


@examples(20)
@given(kind=st.sampled_from(sorted(GROUPS)), depth=st.integers(1, 3), seed=st.integers(0, 10**6))
def test_nobody_waits_for_ever(kind: str, depth: int, seed: int) -> None:
    """Few blocks, priorities, aborts, deaths of the worker and cleared caches; `run` ends only when all are served."""
    rng = random.Random(seed)
    groups, num_blocks = SMALL_POOLS[kind]
    simulation = Simulation(null_config(groups, num_blocks, depth=depth, max_num_seqs=6))

    def dies(plan: StepPlan) -> bool:
        return rng.random() < 0.05 and simulation.executor.num_deaths < 2

    simulation.executor.die_if = dies
    for tokens in tree(rng, rng.randrange(4, 20), 220):
        simulation.add(tokens, max_tokens=rng.randrange(1, 30), priority=rng.choice([0, 0, 0, 1]))
        for _ in range(rng.randrange(4)):
            simulation.turn()
            simulation.core.check()
        if rng.random() < 0.1:
            simulation.abort(rng.choice(list(simulation.prompts)))
        if rng.random() < 0.05:
            clear(simulation, "")
    run_all(simulation)
