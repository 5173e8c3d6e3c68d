"""Log-probabilities of prompts in the engine: bounded steps, no cached tokens, nothing twice; requests of no tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypto_serving.backend.null.device import next_digest
from pypto_serving.types import step
from pypto_serving.types.arrays import unpack_ids
from pypto_serving.types.sampling import SamplingParams
from pypto_serving.types.step import BackendTraits
from tests.sched.scores import assert_prompt_logprobs
from tests.simulation import VOCAB_SIZE, Simulation, null_config
from tests.thinning import examples

HOST = {"traits": BackendTraits(), "backend_options": {"fails_on": -1}}


def simulation_of(**changes: Any) -> Simulation:
    """A replica whose host samples, so that it can score prompts."""
    return Simulation(null_config(**(HOST | {"num_blocks": 200} | changes)))


def scoring(width: int = 2, max_tokens: int = 0) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, prompt_logprobs=width)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


def computed(simulation: Simulation) -> int:
    """Number of tokens computed by all steps."""
    return sum(map(sum, counts(simulation)))


def counts(simulation: Simulation) -> list[list[int]]:
    """Tokens of each row in each step."""
    return [unpack_ids(plan.num_tokens).tolist() for plan in simulation.executor.plans]


@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=6),
    budget=st.integers(1, 64),
    limit=st.integers(1, 16),
    chunk=st.sampled_from((1, 8)),
    chunked=st.booleans(),
    seed=st.integers(0, 2**16),
)
@examples(25)
def test_any_cut_gives_the_same_values(
    lengths: list[int], budget: int, limit: int, chunk: int, chunked: bool, seed: int
) -> None:
    """Prompts that follow each other's prefixes, with and without output, scored or not, killed once."""
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "MAX_PROMPT_LOGPROBS", limit)
        simulation = simulation_of(
            traits=BackendTraits(chunk_tokens=chunk),
            max_num_batched_tokens=max(budget, chunk + 1) if chunked else 256,
            enable_chunked_prefill=chunked,
            num_blocks=40,
        )
        most = simulation.config.limits.max_prompt_logprobs
        dies_at = rng.randrange(1, 20)
        simulation.executor.die_if = lambda plan: plan.step_id == dies_at
        for length in lengths:
            params = scoring(rng.randrange(3), rng.choice((0, 1, 5)))
            simulation.add(prompt(length, seed=length % 2), params=params)
            simulation.add(prompt(length, seed=length % 2), max_tokens=rng.choice((0, 3)))
        simulation.run()
    assert most == max(chunk, min(limit, simulation.config.limits.max_num_batched_tokens))
    for request_id, output in simulation.last.items():
        params = simulation.requests[request_id].params
        assert output.finish_reason == "length" and len(simulation.tokens[request_id]) == params.max_tokens
        simulation.assert_correct(request_id)
        assert_prompt_logprobs(simulation, request_id)
        assert all(part.num_tokens <= most for part in simulation.prompt_logprobs[request_id])


def test_a_step_scores_no_more_than_its_logits_hold() -> None:
    simulation = simulation_of(max_num_batched_tokens=1024, max_model_len=1024)
    for i in range(3):
        simulation.add(prompt(300, seed=i), params=scoring())
    plain = simulation.add(prompt(300, seed=9))
    simulation.run()
    most = simulation.config.limits.max_prompt_logprobs
    assert most == 128
    assert [sum(step_counts) for step_counts in counts(simulation)[:2]] == [128, 128]
    assert computed(simulation) == 4 * 300 + 7
    simulation.assert_correct(plain)


def test_cached_tokens_are_computed_again_and_published() -> None:
    simulation = simulation_of()
    tokens = prompt(70)
    simulation.add(tokens)
    simulation.run()
    before = computed(simulation)
    first = simulation.add(tokens, params=scoring())
    simulation.run()
    assert computed(simulation) - before == 70 and simulation.last[first].num_cached_tokens == 0
    other = simulation.add(prompt(70, seed=1), params=scoring())
    simulation.run()
    assert simulation.last[other].num_cached_tokens == 0
    again = simulation.add(prompt(70, seed=1))
    simulation.run()
    assert simulation.last[again].num_cached_tokens == 64


@pytest.mark.parametrize("length", [1, 2, 16, 17, 33])
def test_a_request_of_no_tokens_computes_its_prompt(length: int) -> None:
    """Also if all of it but a token is cached. It counts no output, and its time to decode is 0."""
    simulation = simulation_of()
    for cached in (0, (length - 1) // 16 * 16):
        request_id = simulation.add(prompt(length), max_tokens=0)
        simulation.run()
        output = simulation.last[request_id]
        assert (output.finish_reason, output.token_ids, output.num_cached_tokens) == ("length", b"", cached)
        assert output.timeline is not None
        assert output.timeline.scheduled_s <= output.timeline.first_token_s == output.timeline.finished_s
    assert computed(simulation) == 2 * length - (length - 1) // 16 * 16
    assert simulation.counters.generation_tokens == 0 and simulation.counters.prompt_tokens == 2 * length


def test_choices_without_scores_follow_the_one_that_has_them() -> None:
    """As the API asks for n choices: the first scores the prompt, the others share what it computes."""
    simulation = simulation_of(max_num_seqs=128, num_blocks=2000)
    tokens = prompt(200)
    simulation.add(tokens, params=scoring(max_tokens=2))
    for _ in range(127):
        simulation.add(tokens, max_tokens=2)
    simulation.run()
    assert computed(simulation) == 200 + 127 * (200 - 192) + 128


@pytest.mark.parametrize("max_tokens", [0, 1, 2])
def test_a_prompt_that_cannot_be_scored_fails_whatever_it_samples(max_tokens: int) -> None:
    """Also if the only token to sample comes out of the same step."""
    tokens = prompt(20)
    groups = null_config().cache.groups
    fails_on = next_digest(groups, tokens[:15]) % VOCAB_SIZE
    simulation = simulation_of(backend_options={"fails_on": fails_on})
    request_id = simulation.add(tokens, params=scoring(max_tokens=max_tokens))
    simulation.run()
    output = simulation.last[request_id]
    assert output.finish_reason == "error" and output.fault is not None and output.fault.code == "not_finite"
    assert simulation.prompt_logprobs[request_id] == []


def test_a_device_that_samples_refuses_to_score() -> None:
    simulation = Simulation(null_config())
    request_id = simulation.add(prompt(20), params=scoring())
    simulation.turn()
    fault = simulation.last[request_id].fault
    assert fault is not None and (fault.status, fault.code) == (400, "unsupported_prompt_logprobs")
    assert "leave it out" in fault.message


@pytest.mark.parametrize("position", [3, 40, 99])
def test_a_prompt_whose_logits_fail_ends_alone(position: int, caplog: pytest.LogCaptureFixture) -> None:
    tokens = prompt(100)
    probe = simulation_of()
    probe.add(tokens[: position + 1], max_tokens=1)
    probe.run()
    (bad,) = probe.tokens["r0"]
    simulation = simulation_of(backend_options={"fails_on": bad}, max_num_batched_tokens=32)
    other = simulation.add(prompt(100, seed=3), max_tokens=0)
    request_id = simulation.add(tokens, params=scoring())
    simulation.run()
    fault = simulation.last[request_id].fault
    assert fault is not None and (fault.status, fault.code) == (500, "not_finite")
    said = {(line.name, line.request_id) for line in caplog.records}  # type: ignore[attr-defined]
    assert said == {("pypto_serving.worker.runner", request_id)} and fault.message in caplog.messages
    assert simulation.last[other].finish_reason == "length"
    simulation.add(tokens, max_tokens=0)
    simulation.run()
    assert simulation.last["r2"].num_cached_tokens == 0, "nothing of a bad prompt may be found"
