"""Worker deaths by the rules: nothing is lost, nothing twice, and a request that kills workers fails alone."""

from __future__ import annotations

import random

import pytest

from pypto_serving.model.null_models import deepseek_v4_groups, plain_groups
from pypto_serving.sched.step import Step
from pypto_serving.types.arrays import unpack_ids
from pypto_serving.types.step import BackendTraits, StepPlan
from tests.simulation import Simulation, null_config


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed * 1000 + length).choices(range(1000), k=length)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("groups", [plain_groups(16), deepseek_v4_groups()], ids=["plain", "deepseek_v4"])
def test_requests_continue_after_many_deaths(groups, depth) -> None:  # type: ignore[no-untyped-def]
    simulation = Simulation(null_config(groups, num_blocks=200, depth=depth))
    rng = random.Random(depth)
    steps_to_live = [5]

    def dies(plan: StepPlan) -> bool:
        steps_to_live[0] -= 1
        if steps_to_live[0] > 0:
            return False
        steps_to_live[0] = rng.randrange(4, 12)
        return True

    simulation.executor.die_if = dies
    requests = [simulation.add(prompt(rng.randrange(1, 90), i), max_tokens=40) for i in range(12)]
    simulation.run()
    assert simulation.executor.num_deaths > 5
    assert simulation.core.stats().num_respawns == simulation.executor.num_deaths
    for request_id in requests:
        simulation.assert_correct(request_id)
        assert len(simulation.tokens[request_id]) == 40


def count_solo_steps(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the suspects of each step that the scheduler gives to one of them alone."""
    scheduler, found = simulation.core.scheduler, list[str]()
    schedule_alone = scheduler._schedule_alone

    def counted(step: Step, now_s: float) -> None:
        found.append(",".join(sorted(scheduler._registry.crash_counts.suspects)))
        schedule_alone(step, now_s)

    monkeypatch.setattr(scheduler, "_schedule_alone", counted)
    return found


def kills(simulation: Simulation, poison: int) -> None:
    """Make every step die that computes the token `poison`."""
    holders: dict[int, list[int]] = {}

    def dies(plan: StepPlan) -> bool:
        for new in plan.new_rows:
            holders[new.row] = [*unpack_ids(new.token_ids)[new.num_computed :]]
        poisoned = False
        for row, count in zip(unpack_ids(plan.rows), unpack_ids(plan.num_tokens), strict=True):
            tokens = holders.get(int(row), [])
            poisoned |= poison in tokens[:count]
            holders[int(row)] = tokens[count:]
        return poisoned

    simulation.executor.die_if = dies


def test_a_request_that_crashes_every_step_it_is_in_fails_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    simulation = Simulation(null_config())
    solo_steps = count_solo_steps(simulation, monkeypatch)
    kills(simulation, poison=5000)
    good = [simulation.add(prompt(10, i), max_tokens=30) for i in range(6)]
    bad = simulation.add([*prompt(4), 5000], max_tokens=30)
    more = [simulation.add(prompt(10, 50 + i), max_tokens=30) for i in range(3)]
    simulation.run()
    fault = simulation.last[bad].fault
    assert fault is not None and fault.status == 500
    assert [(line.message, line.request_id) for line in caplog.records if line.levelname == "ERROR"] == [  # type: ignore[attr-defined]
        (fault.message, bad)
    ]
    assert not simulation.tokens[bad]
    assert simulation.executor.num_deaths == 3
    assert solo_steps
    for request_id in good + more:
        assert simulation.last[request_id].fault is None
        assert len(simulation.tokens[request_id]) == 30
        simulation.assert_correct(request_id)


def test_a_request_that_crashes_a_pipeline_while_the_step_before_is_in_a_later_stage() -> None:
    simulation = Simulation(null_config(traits=BackendTraits(stages=2), depth=2))
    executor = simulation.executor
    executor.die_if = lambda plan: any(
        5000 in unpack_ids(new.token_ids) for each in (plan, *executor._submitted) for new in each.new_rows
    )
    good = [simulation.add(prompt(10, i), max_tokens=30) for i in range(6)]
    for _ in range(8):
        simulation.turn()
    bad = simulation.add([*prompt(4), 5000], max_tokens=30)
    simulation.run()
    fault = simulation.last[bad].fault
    assert fault is not None and fault.status == 500
    assert executor.num_deaths == 3
    for request_id in good:
        simulation.assert_correct(request_id)


def test_a_strike_is_forgiven_once_the_request_gets_past_the_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(null_config())
    solo_steps = count_solo_steps(simulation, monkeypatch)
    deaths_due_at = [20, 19, 18, 8]

    def dies(plan: StepPlan) -> bool:
        if deaths_due_at and simulation.counters.generation_tokens == deaths_due_at[-1]:
            deaths_due_at.pop()
            return True
        return False

    simulation.executor.die_if = dies
    request_id = simulation.add(prompt(10), max_tokens=40)
    simulation.run()
    assert simulation.executor.num_deaths == 4
    assert not solo_steps
    simulation.assert_correct(request_id)


def drafting(accuracy: float) -> Simulation:
    """A replica whose device drafts three tokens."""
    traits = BackendTraits(samples_on_device=True, max_drafts=3)
    return Simulation(null_config(traits=traits, num_drafts=3, backend_options={"draft_accuracy": accuracy}))


def test_a_token_that_crashes_as_a_draft_too_has_three_strikes() -> None:
    """It is the last draft, then the third, then the request's last token, since a suspect has no drafts."""
    simulation = drafting(accuracy=1.0)
    executor, crashed = simulation.executor, list[int]()

    def dies(plan: StepPlan) -> bool:
        assert executor._runner is not None
        if executor._runner.batch.num_computed[0] <= 7:
            return False
        crashed.append(int(unpack_ids(plan.num_drafts).sum()))
        return True

    executor.die_if = dies
    bad = simulation.add(prompt(4), max_tokens=30)
    simulation.run()
    fault = simulation.last[bad].fault
    assert fault is not None and fault.status == 500
    assert crashed == [3, 3, 0]
    simulation.assert_correct(bad)


def test_no_request_fails_for_its_drafts() -> None:
    simulation = drafting(accuracy=0.0)
    simulation.executor.die_if = lambda plan: bool(plan.num_drafts)
    request_id = simulation.add(prompt(4), max_tokens=30)
    simulation.run()
    assert simulation.executor.num_deaths > 3
    assert len(simulation.tokens[request_id]) == 30
    simulation.assert_correct(request_id)


def test_late_aborts_and_new_requests_between_lives() -> None:
    simulation = Simulation(null_config())
    first, second = simulation.add(prompt(10), max_tokens=30), simulation.add(prompt(11), max_tokens=30)
    while len(simulation.tokens[first]) < 5:
        simulation.turn()
    simulation.executor.die_if = lambda plan: simulation.executor.num_deaths == 0
    while not simulation.executor.num_deaths:
        simulation.turn()
    simulation.abort(second)
    third = simulation.add(prompt(12), max_tokens=30)
    simulation.run()
    assert simulation.last[second].finish_reason == "abort"
    simulation.assert_correct(first)
    simulation.assert_correct(third)
    assert len(simulation.tokens[first]) == len(simulation.tokens[third]) == 30


def test_a_new_life_trusts_no_cached_block() -> None:
    simulation = Simulation(null_config())
    simulation.add(prompt(64), max_tokens=2)
    simulation.run()
    hits = simulation.counters.prefix_hits
    simulation.executor.die_if = lambda plan: simulation.executor.num_deaths == 0
    again = simulation.add(prompt(64), max_tokens=2)
    simulation.run()
    simulation.assert_correct(again)
    assert simulation.executor.num_deaths == 1
    assert simulation.counters.prefix_hits == hits + 48, "the hit counted before the death stays, no other is made"


def test_the_replica_fails_its_requests_when_the_executor_gives_up() -> None:
    from pypto_serving.engine.worker_process import GaveUp

    simulation = Simulation(null_config())
    request_id = simulation.add(prompt(10), max_tokens=30)
    while not simulation.tokens[request_id]:
        simulation.turn()
    simulation.executor.poll = lambda now_s: [GaveUp("out of luck", 4)]  # type: ignore[method-assign]
    simulation.turn()
    fault = simulation.last[request_id].fault
    assert fault is not None and fault.status == 503 and "out of luck" in fault.message
    assert simulation.core.stopping
