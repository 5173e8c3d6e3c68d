"""Requests whose time is over end at once, alone, and hold nothing."""

from __future__ import annotations

import random

import pytest

from tests.kv.groups import blocks_in_use
from tests.simulation import Simulation, null_config


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed * 1000 + length).choices(range(1000), k=length)


def test_a_deadline_in_the_queue_fails_the_request_alone() -> None:
    simulation = Simulation(null_config(max_num_seqs=1))
    first = simulation.add(prompt(5), max_tokens=50)
    late = simulation.add(prompt(5, 1), max_tokens=50, deadline_s=simulation.clock.now() + 0.1)
    patient = simulation.add(prompt(5, 2), max_tokens=50, deadline_s=simulation.clock.now() + 100)
    simulation.run()
    for request_id in simulation.prompts:
        simulation.assert_correct(request_id)
    fault = simulation.last[late].fault
    assert fault is not None and (fault.status, fault.code) == (504, "deadline_exceeded")
    assert fault.message.endswith(" s, in the queue")
    assert len(simulation.tokens[first]) == len(simulation.tokens[patient]) == 50


@pytest.mark.parametrize("depth", [1, 3])
def test_a_deadline_ends_what_runs_and_frees_its_blocks_at_once(depth: int) -> None:
    simulation = Simulation(null_config(depth=depth))
    deadline_s = simulation.clock.now() + 0.4
    late = simulation.add(prompt(100), max_tokens=150, deadline_s=deadline_s)
    while late not in simulation.last:
        assert simulation.clock.now() < deadline_s + 0.1
        simulation.turn()
    assert simulation.clock.now() >= deadline_s
    fault = simulation.last[late].fault
    assert fault is not None and (fault.status, fault.code) == (504, "deadline_exceeded")
    assert fault.message.endswith(f" s, with {len(simulation.tokens[late])} output tokens")
    assert 5 < len(simulation.tokens[late]) < 150
    assert not any(blocks_in_use(simulation.core.scheduler.kv))
    other = simulation.add(prompt(50, 1), max_tokens=20, deadline_s=simulation.clock.now() + 50)
    simulation.run()
    simulation.assert_correct(other)


def test_deadlines_pass_while_no_worker_is_ready() -> None:
    simulation = Simulation(null_config())
    late = simulation.add(prompt(10), max_tokens=150, deadline_s=simulation.clock.now() + 0.4)
    simulation.turn()
    simulation.core._ready = False
    simulation.clock.advance(0.5)
    simulation.core.turn()
    simulation.core._ready = True
    simulation.run()
    assert simulation.last[late].fault is not None
