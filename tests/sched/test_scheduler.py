"""The scheduler on the null backend: every answer is compared with what a correct engine answers."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypto_serving.backend.null.program import NullProgram
from pypto_serving.errors import ConfigError
from pypto_serving.model.null_models import deepseek_v4_groups, plain_groups
from pypto_serving.types.arrays import unpack_ids
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.guide import Grammar, Guide
from pypto_serving.types.sampling import SamplingParams
from pypto_serving.types.step import BackendTraits
from tests.kv.groups import blocks_in_use
from tests.simulation import Simulation, null_config
from tests.thinning import examples


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed * 1000 + length).choices(range(1000), k=length)


def run_all(simulation: Simulation) -> None:
    simulation.run()
    for request_id in simulation.prompts:
        simulation.assert_correct(request_id)


def test_requests_share_steps() -> None:
    simulation = Simulation(null_config())
    for i in range(8):
        simulation.add(prompt(10, i), max_tokens=20)
    run_all(simulation)
    assert simulation.counters.max_step_rows == 8
    assert simulation.counters.num_steps < 8 * 20, "requests ran one after the other"


def test_chunked_prefill_computes_each_prompt_token_once() -> None:
    simulation = Simulation(null_config(max_num_batched_tokens=16, enable_prefix_caching=False))
    simulation.add(prompt(100), max_tokens=1)
    run_all(simulation)
    counts = [int(unpack_ids(plan.num_tokens).sum()) for plan in simulation.executor.plans]
    assert counts == [16] * 6 + [4]


def test_long_prefill_threshold_bounds_a_chunk() -> None:
    simulation = Simulation(null_config(long_prefill_token_threshold=10))
    simulation.add(prompt(45), max_tokens=1)
    run_all(simulation)
    assert max(int(unpack_ids(p.num_tokens).max()) for p in simulation.executor.plans) == 10


def test_without_chunked_prefill_prompts_stay_whole_and_neither_side_starves() -> None:
    config = null_config(enable_chunked_prefill=False, max_num_batched_tokens=256, num_blocks=200)
    simulation = Simulation(config)
    for i in range(10):
        simulation.add(prompt(200, i), max_tokens=20)
    run_all(simulation)
    sizes = {int(n) for plan in simulation.executor.plans for n in unpack_ids(plan.num_tokens)}
    assert sizes == {1, 200}
    assert simulation.counters.max_step_rows > 1


def test_a_fully_cached_prompt_still_decodes() -> None:
    simulation = Simulation(null_config())
    simulation.add(prompt(64), max_tokens=4)
    run_all(simulation)
    again = simulation.add(prompt(64), max_tokens=4)
    run_all(simulation)
    assert simulation.last[again].num_cached_tokens == 48
    assert len(simulation.tokens[again]) == 4


def test_preempted_requests_recompute_what_they_emitted() -> None:
    simulation = Simulation(null_config(num_blocks=18, max_model_len=256))
    requests = [simulation.add(prompt(40, i), max_tokens=100) for i in range(6)]
    run_all(simulation)
    assert simulation.counters.num_preemptions > 0
    assert all(len(simulation.tokens[r]) == 100 for r in requests)
    assert max(o.timeline.num_preemptions for o in simulation.last.values() if o.timeline) > 0


def test_preemption_is_bounded_and_the_oldest_is_never_a_victim() -> None:
    simulation = Simulation(null_config(num_blocks=18, max_model_len=256, enable_prefix_caching=False))
    requests = [simulation.add(prompt(30, i), max_tokens=120) for i in range(12)]
    run_all(simulation)
    timelines = [simulation.last[r].timeline for r in requests]
    preemptions = [t.num_preemptions for t in timelines if t is not None]
    assert sum(preemptions) > 0
    assert preemptions[0] == 0
    assert max(preemptions) <= 8
    computed = sum(int(unpack_ids(p.num_tokens).sum()) for p in simulation.executor.plans)
    assert computed < 3 * sum(30 + 120 for _ in requests), "most of the work was thrown away"


@pytest.mark.parametrize("kind", ["plain", "deepseek_v4"])
@pytest.mark.parametrize("depth", [1, 2])
def test_admission_leaves_room_for_prompts_that_are_being_computed(kind: str, depth: int) -> None:
    """The threshold cuts every prompt, so the first chunks of all would fit at once."""
    groups, num_blocks = {"plain": (plain_groups(16), 141), "deepseek_v4": (deepseek_v4_groups(), 2000)}[kind]
    blocks = tuple(18 if group.keeps_history and kind == "deepseek_v4" else num_blocks for group in groups)
    changes = {"max_model_len": 1024, "max_num_batched_tokens": 256, "long_prefill_token_threshold": 32}
    simulation = Simulation(null_config(groups, blocks, depth=depth, **changes))
    for i in range(8):
        simulation.add(prompt(800, i), max_tokens=4)
    run_all(simulation)
    assert simulation.counters.num_preemptions == 0
    assert sum(int(unpack_ids(plan.num_tokens).sum()) for plan in simulation.executor.plans) == 8 * 803


def test_a_victim_is_never_in_the_step_that_preempts_it() -> None:
    simulation = Simulation(null_config(num_blocks=18))
    for i in range(8):
        simulation.add(prompt(20, i), max_tokens=80)
    run_all(simulation)
    assert simulation.counters.num_preemptions > 0
    for plan in simulation.executor.plans:
        rows = unpack_ids(plan.rows).tolist()
        assert len(rows) == len(set(rows))
        entering = {new.row for new in plan.new_rows}
        assert set(unpack_ids(plan.drops).tolist()) & set(rows) <= entering


def test_decodes_go_on_while_a_long_prompt_is_computed() -> None:
    simulation = Simulation(null_config(max_num_batched_tokens=16))
    decoding = simulation.add(prompt(8), max_tokens=60)
    for _ in range(6):
        simulation.turn()
    simulation.add(prompt(200, 1), max_tokens=1)
    before = len(simulation.executor.plans)
    run_all(simulation)
    steps = simulation.executor.plans[before : before + 12]
    assert all(1 in unpack_ids(plan.num_tokens).tolist() for plan in steps), "a decode waited for the prompt"
    assert len(simulation.tokens[decoding]) == 60


@pytest.mark.parametrize("budget", [1, 2, 7])
def test_a_budget_below_the_batch_serves_everybody_in_turn(budget: int) -> None:
    simulation = Simulation(null_config(max_num_batched_tokens=budget, num_blocks=200))
    requests = [simulation.add(prompt(3, i), max_tokens=20) for i in range(16)]
    run_all(simulation)
    assert all(len(simulation.tokens[r]) == 20 for r in requests)


def test_max_model_len_ends_a_request() -> None:
    simulation = Simulation(null_config(max_model_len=64))
    request_id = simulation.add(prompt(50), max_tokens=None)
    run_all(simulation)
    assert len(simulation.tokens[request_id]) == 14
    assert simulation.last[request_id].finish_reason == "length"


def test_a_prompt_longer_than_the_window_is_refused_with_both_lengths() -> None:
    simulation = Simulation(null_config(max_model_len=64))
    request_id = simulation.add(prompt(64))
    simulation.run()
    fault = simulation.last[request_id].fault
    assert fault is not None and fault.status == 400 and "64 tokens" in fault.message


def test_an_empty_prompt_is_refused() -> None:
    simulation = Simulation(null_config())
    request_id = simulation.add([])
    simulation.run()
    fault = simulation.last[request_id].fault
    assert fault is not None and fault.status == 400


def test_stop_token_ends_a_request_and_min_tokens_delays_it() -> None:
    simulation = Simulation(null_config())
    answer = Simulation(null_config())
    reference = answer.add(prompt(5), max_tokens=10)
    answer.run()
    stop = answer.tokens[reference][3]
    greedy = SamplingParams(temperature=0, max_tokens=10)
    params = msgspec.structs.replace(greedy, stop_token_ids=(stop,))
    stopped = simulation.add(prompt(5), params=params)
    eos = simulation.add(prompt(5), params=greedy, eos_token_ids=(stop,))
    ignoring = simulation.add(
        prompt(5), params=SamplingParams(temperature=0, max_tokens=10, ignore_eos=True), eos_token_ids=(stop,)
    )
    late = simulation.add(
        prompt(5), params=SamplingParams(temperature=0, max_tokens=10, min_tokens=5), eos_token_ids=(stop,)
    )
    run_all(simulation)
    assert [len(simulation.tokens[r]) for r in (stopped, eos, ignoring)] == [4, 4, 10]
    assert len(simulation.tokens[late]) > 4
    assert (simulation.last[stopped].stop_token_id, simulation.last[eos].stop_token_id) == (stop, None)


def test_finished_requests_leave_the_registry() -> None:
    simulation = Simulation(null_config())
    for i in range(50):
        simulation.add(prompt(5, i), max_tokens=2)
    run_all(simulation)
    scheduler = simulation.core.scheduler
    assert not scheduler._registry.requests and len(scheduler.kv) == 0


def test_priority_goes_before_arrival() -> None:
    simulation = Simulation(null_config(max_num_seqs=1))
    low = simulation.add(prompt(5), max_tokens=5, priority=1)
    high = simulation.add(prompt(5, 1), max_tokens=5, priority=0)
    run_all(simulation)
    assert list(simulation.last) == [high, low]


def test_step_messages_do_not_grow_with_the_context() -> None:
    simulation = Simulation(null_config(num_blocks=600, max_model_len=8192, max_num_batched_tokens=4096))
    simulation.add(prompt(4000), max_tokens=3)
    run_all(simulation)
    for plan in simulation.executor.plans[1:]:
        assert not plan.new_rows
        assert sum(map(len, plan.new_blocks)) <= 8


def test_a_pool_too_small_for_one_request_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="raise the option kv-memory or lower the option max-model-len"):
        Simulation(null_config(num_blocks=10, max_model_len=1024))


def test_aborts_in_queue_prefill_and_decode_free_everything_at_once() -> None:
    simulation = Simulation(null_config(max_num_seqs=2, max_num_batched_tokens=16))
    decoding, prefilling, queued = (simulation.add(prompt(n, n), max_tokens=50) for n in (4, 200, 5))
    while not simulation.tokens[decoding]:
        simulation.turn()
    scheduler = simulation.core.scheduler
    assert scheduler.num_running == 2 and scheduler.num_waiting == 1
    simulation.abort(decoding, prefilling, queued, "unknown")
    simulation.turn()
    assert not scheduler.has_work
    assert blocks_in_use(scheduler.kv) == (0,)
    assert {o.finish_reason for o in simulation.last.values()} == {"abort"}
    simulation.run()


GROUP_SETS = {
    "plain": (plain_groups(16), (24,)),
    "deepseek_v4": (deepseek_v4_groups(), (8, 6, 6, 60, 60, 60)),
}


@examples(25)
@given(
    kind=st.sampled_from(sorted(GROUP_SETS)),
    depth=st.integers(1, 3),
    budget=st.sampled_from([3, 16, 64]),
    caching=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_random_traffic_with_aborts_and_deaths(kind: str, depth: int, budget: int, caching: bool, seed: int) -> None:
    rng = random.Random(seed)
    groups, num_blocks = GROUP_SETS[kind]
    config = null_config(
        groups, num_blocks, depth=depth, max_num_batched_tokens=budget, enable_prefix_caching=caching, max_num_seqs=5
    )
    simulation = Simulation(config)
    shared = prompt(180, seed)
    for _ in range(rng.randrange(4, 16)):
        tail = prompt(rng.randrange(1, 40), rng.randrange(100))
        simulation.add(shared[: rng.randrange(len(shared))] + tail, max_tokens=rng.randrange(1, 30))
        for _ in range(rng.randrange(8)):
            simulation.turn()
            simulation.core.check()
        if rng.random() < 0.2:
            simulation.abort(rng.choice(list(simulation.prompts)))
    run_all(simulation)


def test_the_property_runs_meet_hits_and_preemptions() -> None:
    """The random traffic above would prove little if nothing happened in it."""
    for groups, num_blocks in GROUP_SETS.values():
        simulation = Simulation(null_config(groups, num_blocks, max_num_seqs=5))
        for i in range(12):
            simulation.add(prompt(180)[: 60 + 10 * i] + prompt(5, i), max_tokens=40)
        run_all(simulation)
        assert simulation.counters.prefix_hits > 0
        assert simulation.counters.num_preemptions > 0


def test_the_same_calls_give_the_same_plans() -> None:
    """Decisions are pure: a recorded run, replayed, plans byte for byte the same."""

    def plans() -> list[bytes]:
        simulation = Simulation(null_config(num_blocks=18, max_num_seqs=6, depth=2))
        for i in range(10):
            simulation.add(prompt(20 + 5 * i, 1), max_tokens=60, request_id=f"fixed-{i}")
        run_all(simulation)
        assert simulation.counters.num_preemptions > 0
        return [msgspec.msgpack.encode(plan) for plan in simulation.executor.plans]

    assert plans() == plans()


def test_a_long_prompt_gets_on_under_a_stream_of_short_ones() -> None:
    """Blocks that come free go to those already running before anybody new starts."""
    config = null_config(num_blocks=18, max_num_batched_tokens=128, long_prefill_token_threshold=64)
    simulation = Simulation(config)
    long = simulation.add(prompt(230), max_tokens=4)
    for i in range(400):
        simulation.add(prompt(3, i), max_tokens=8)
        simulation.turn()
        if long in simulation.last:
            break
    assert long in simulation.last
    assert len(simulation.last) < 300
    run_all(simulation)


def test_decodes_keep_their_pace_while_a_whole_prompt_waits_for_blocks() -> None:
    config = null_config(num_blocks=26, enable_chunked_prefill=False, max_num_batched_tokens=256)
    simulation = Simulation(config)
    decodes = [simulation.add(prompt(10, i), max_tokens=60) for i in range(4)]
    for _ in range(8):
        simulation.turn()
    simulation.add(prompt(250), max_tokens=2)
    before = len(simulation.executor.plans)
    run_all(simulation)
    full = [plan for plan in simulation.executor.plans[before : before + 40] if len(plan.rows) // 4 == len(decodes)]
    assert len(full) >= 15


def test_a_prompt_starts_beside_decodes_that_draft() -> None:
    """Drafts take at most an eighth of the budget while a prompt waits."""
    turns = []
    for num_drafts in (0, 3):
        traits = BackendTraits(samples_on_device=True, max_drafts=num_drafts)
        options = {"draft_accuracy": 0.0}
        changes = {"traits": traits, "num_drafts": num_drafts, "backend_options": options}
        simulation = Simulation(null_config(num_blocks=200, max_num_batched_tokens=32, **changes))
        for i in range(8):
            simulation.add(prompt(4, i), max_tokens=150)
        for _ in range(6):
            simulation.turn()
        late = simulation.add(prompt(40), max_tokens=1)
        turns.append(0)
        while late not in simulation.last:
            simulation.turn()
            turns[-1] += 1
    assert turns[0] <= turns[1] <= turns[0] + 1


def test_drafts_up_to_a_stop_are_the_requests_and_those_behind_it_are_the_samplers() -> None:
    """The step behind the first token has three drafts that are right; the second of them ends the request."""
    traits = BackendTraits(samples_on_device=True, max_drafts=3)
    simulation = Simulation(null_config(traits=traits, num_drafts=3, backend_options={"draft_accuracy": 1.0}))
    request_id = simulation.add(prompt(4), params=SamplingParams(max_tokens=20, temperature=0))
    stop = simulation.expected(request_id, 3)[-1]
    stopped = simulation.add(prompt(4), params=SamplingParams(max_tokens=20, temperature=0, stop_token_ids=(stop,)))
    simulation.abort(request_id)
    simulation.run()
    assert len(simulation.tokens[stopped]) == 3
    assert (simulation.accepted[stopped], simulation.rejected[stopped]) == (2, 1)
    counters = simulation.counters
    assert (counters.num_draft_rounds, counters.num_drafts, counters.accepted_at) == (1, 3, [1, 1, 1])


def test_a_worker_whose_limits_are_not_the_configured_ones_ends_the_replica() -> None:
    def weaker(config: EngineConfig) -> NullProgram:
        program = NullProgram(config)
        program.limits = msgspec.structs.replace(program.limits, max_num_seqs=program.limits.max_num_seqs - 1)
        return program

    simulation = Simulation(null_config(), make_program=weaker)
    request_id = simulation.add(prompt(4))
    for _ in range(5):
        simulation.turn()
    fault = simulation.last[request_id].fault
    assert fault is not None and "limits" in fault.message


def test_log_probabilities_that_the_program_cannot_return_are_refused() -> None:
    simulation = Simulation(null_config(traits=BackendTraits(samples_on_device=True, max_logprobs=2)))
    params = SamplingParams(max_tokens=2, temperature=0, logprobs=3)
    fewer = msgspec.structs.replace(params, logprobs=2)
    naming = msgspec.structs.replace(params, logprobs=0, logprob_token_ids=(1,))
    *refused, served = (simulation.add(prompt(4), params=each) for each in (params, naming, fewer))
    simulation.run()
    for each in refused:
        fault = simulation.last[each].fault
        assert fault is not None and (fault.status, fault.code) == (400, "unsupported_logprobs")
    assert [len(simulation.logprobs[r]) for r in (*refused, served)] == [0, 0, 2]


@pytest.mark.parametrize(
    "wanted",
    [
        {"frequency_penalty": 0.1},
        {"presence_penalty": -0.1},
        {"repetition_penalty": 1.1},
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": (3,)},
        {"bad_word_ids": ((3,),)},
        {"min_tokens": 1},
        {"guide": Guide(Grammar("regex", "a"), field="guide")},
    ],
)
def test_changes_of_logits_that_a_device_cannot_make_are_refused(wanted: dict[str, Any]) -> None:
    simulation = Simulation(null_config(traits=BackendTraits(samples_on_device=True, adjusts_logits=False)))
    params = SamplingParams(max_tokens=2, temperature=0)
    refused, served = (
        simulation.add(prompt(4), params=each) for each in (msgspec.structs.replace(params, **wanted), params)
    )
    simulation.run()
    fault = simulation.last[refused].fault
    assert fault is not None and (fault.status, fault.code) == (400, "unsupported_adjustment")
    assert f"what {next(iter(wanted))} asks for" in fault.message
    assert len(simulation.tokens[served]) == 2


@pytest.mark.parametrize("seed", range(3))
def test_a_decode_without_blocks_does_not_keep_the_others_from_running(seed: int) -> None:
    """The budget leaves decodes one token beside prompts, and the least recently served one finds no block."""
    rng = random.Random(seed)
    config = null_config(plain_groups(4), num_blocks=20, max_model_len=64, max_num_batched_tokens=2, max_num_seqs=8)
    simulation = Simulation(config)
    for i in range(24):
        simulation.add(prompt(rng.randrange(1, 20), i), max_tokens=rng.randrange(1, 40))
    run_all(simulation)
    assert simulation.counters.num_preemptions > 0


def test_a_whole_prompt_of_the_budget_waits_for_blocks_beside_decodes() -> None:
    """In the steps that are kept for the prompt, decodes go on if it cannot start."""
    config = null_config(num_blocks=18, enable_chunked_prefill=False, max_num_batched_tokens=256, max_num_seqs=8)
    simulation = Simulation(config)
    decodes = [simulation.add(prompt(16, i), max_tokens=40) for i in range(4)]
    for _ in range(8):
        simulation.turn()
    before = len(simulation.executor.plans)
    whole = simulation.add(prompt(255), max_tokens=1)
    run_all(simulation)
    assert len(simulation.tokens[whole]) == 1
    beside = simulation.executor.plans[before:-1]
    assert [len(plan.rows) // 4 for plan in beside] == [len(decodes)] * len(beside)


def test_a_step_without_chunked_prefill_must_hold_the_longest_prompt() -> None:
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens is 64, .* give at least 256"):
        null_config(enable_chunked_prefill=False, max_num_batched_tokens=64)


def test_decodes_use_the_share_of_a_prompt_that_cannot_start() -> None:
    simulation = Simulation(null_config(num_blocks=36, max_num_batched_tokens=8))
    decodes = [simulation.add(prompt(8, i), max_tokens=80) for i in range(8)]
    for _ in range(40):
        simulation.turn()
    before = len(simulation.executor.plans)
    simulation.add(prompt(240), max_tokens=1)
    for _ in range(10):
        simulation.turn()
    assert {len(plan.rows) // 4 for plan in simulation.executor.plans[before:]} == {len(decodes)}
    run_all(simulation)


@pytest.mark.parametrize("budget", [16, 64])
def test_the_budget_goes_to_the_most_important_prompt(budget: int) -> None:
    """The running prompt keeps its row and its blocks, and goes on when the other is done."""
    simulation = Simulation(null_config(num_blocks=100, max_model_len=1024, max_num_batched_tokens=budget))
    low = simulation.add(prompt(900), max_tokens=2, priority=5)
    for _ in range(4):
        simulation.turn()
    before = len(simulation.executor.plans)
    high = simulation.add(prompt(100, 1), max_tokens=1, priority=-5)
    while high not in simulation.last:
        simulation.turn()
    assert len(simulation.executor.plans) - before <= -(-100 // budget) + 1
    run_all(simulation)
    assert len(simulation.tokens[low]) == 2 and simulation.counters.num_preemptions == 0
    assert sum(int(unpack_ids(plan.num_tokens).sum()) for plan in simulation.executor.plans) == 900 + 1 + 100
