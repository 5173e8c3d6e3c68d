"""Rows with a guide under random schedules of the null backend: each answer is the oracle's, token by token."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pypto_serving.api.chat.parsers.families import FAMILIES
from pypto_serving.api.grammars.structured import json_options
from pypto_serving.api.grammars.tool_grammar import forced_calls, strict_calls
from pypto_serving.backend.null.device import SAMPLER, logits_of, next_digest
from pypto_serving.backend.numpy_sampler import uniforms
from pypto_serving.guidance import Compiler
from pypto_serving.types.config import NgramConfig
from pypto_serving.types.guide import Grammar, Guide, Reasoning
from pypto_serving.types.sampler import DRAW
from pypto_serving.types.sampling import SamplingParams
from pypto_serving.types.step import BackendTraits
from pypto_serving.worker import guides
from pypto_serving.worker.reasoning import TokenTexts
from pypto_serving.worker.row_guide import RowGuide
from tests.checkpoints import NUM_BYTES, byte_ids, write_tokenizer
from tests.simulation import Simulation, null_config
from tests.thinning import some

VOCAB_SIZE = 300
END = NUM_BYTES + 2
JSON = '{"type": "object", "properties": {"name": {"enum": ["some long text", "short"]}}, "required": ["name"]}'
TOOL = {"name": "f", "parameters": {"properties": {"x": {"type": "string", "maxLength": 9}}, "required": ["x"]}}


def forced(family: str) -> Grammar:
    return forced_calls(FAMILIES[family], [TOOL], False, lambda text: None, json_options())


def strict(family: str) -> Grammar:
    return strict_calls(FAMILIES[family], [{**TOOL, "strict": True}], False, lambda text: None, json_options())


GUIDES = (
    Guide(Grammar("json_schema", JSON.replace("}}, ", '}}, "additionalProperties": false, '))),
    Guide(Grammar("regex", "[a-z]{3,30}(-forced-)[0-9]{2}")),
    Guide(Grammar("lark", 'start: "(" start? ")"')),
    Guide(Grammar("regex", "[0-9]{4}"), Reasoning("", "+,", (), (), byte_ids("+,")), 6),
    Guide(forced("hermes")),
    Guide(forced("qwen3_coder"), Reasoning("", "+,", ("<",), (), byte_ids("+,")), 20),
    Guide(strict("pythonic")),
    Guide(None, Reasoning("", "+,-", (), (), byte_ids("+,-")), 4),
)
SHAPES: dict[str, dict[str, Any]] = {
    "host": {"traits": BackendTraits()},
    "host ahead": {"traits": BackendTraits(), "depth": 3},
    "pipeline": {"traits": BackendTraits(stages=3), "depth": 3},
    "split steps": {"traits": BackendTraits(mixed_steps=False, padded_rows=(2, 8)), "depth": 2},
    "drafts of the host": {"traits": BackendTraits(max_drafts=2), "num_drafts": 2},
    "drafts that are looked up": {
        "traits": BackendTraits(max_drafts=4),
        "num_drafts": 4,
        "ngram": NgramConfig(shortest=1),
        "depth": 2,
    },
    "device": {"traits": BackendTraits(samples_on_device=True)},
    "device ahead": {"traits": BackendTraits(samples_on_device=True, mixed_steps=False, chunk_tokens=8), "depth": 3},
    "device drafts": {"traits": BackendTraits(samples_on_device=True, max_drafts=3), "num_drafts": 3, "depth": 2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def compiler(model: Path) -> Compiler:
    return Compiler.of(str(model), VOCAB_SIZE, [END])


def expected(simulation: Simulation, request_id: str, compiler: Compiler) -> list[int]:
    """What a correct engine answers: alone, computing every token in order."""
    request, prompt = simulation.requests[request_id], simulation.prompts[request_id]
    params, history = request.params, list(prompt)
    assert params.guide is not None and params.max_tokens is not None
    grammar = params.guide.grammar
    matcher = None if grammar is None else compiler.compile(grammar)
    bits = np.zeros(compiler.num_words, np.uint32)
    guide = RowGuide(params.guide, (END,), matcher, bits, params.logprobs is None, TokenTexts(compiler.tokens))
    guide.open()
    while END not in history[len(prompt) :] and len(history) < len(prompt) + params.max_tokens:
        choice = guide.choice()
        tokens = list(choice.forced)
        if not tokens:
            logits = logits_of(next_digest(simulation.config.cache.groups, history), VOCAB_SIZE, -1).copy()
            if choice.mask is not None:
                allowed = np.unpackbits(choice.mask.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
                logits[allowed == 0] = -np.inf
            draw = np.array([(0.0, 1.0, 0.0, params.temperature, 0)], DRAW)
            numbers = (np.array([v], np.uint64) for v in (request.seed, request.choice, len(history)))
            draw["random"] = uniforms(*numbers)
            tokens = [int(SAMPLER.choose(logits[None], draw)[0])]
        history += tokens
        for token in tokens:
            guide.append(token)
    return history[len(prompt) :][: params.max_tokens]


def guided_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=rng.randrange(5, 60),
        temperature=rng.choice((0.0, 1.0)),
        logprobs=rng.choice((None, None, 0)),
        guide=rng.choice(GUIDES),
    )


def churn(simulation: Simulation, rng: random.Random, compiler: Compiler, count: int) -> Counter[str]:
    """Guided and plain requests, deaths and aborts; then every answer must be the oracle's."""
    executor, found = simulation.executor, Counter[str]()
    executor.die_if = lambda plan: rng.random() < 0.02 and executor.num_deaths < 2
    plain = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    for _ in range(count):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 60))]
        params = guided_params(rng) if rng.random() < 0.7 else plain
        request_id = simulation.add(prompt, params=params, seed=rng.getrandbits(60), eos_token_ids=(END,))
        for _ in range(rng.randrange(0, 15)):
            simulation.turn()
        simulation.core.check()
        if rng.random() < 0.1:
            simulation.abort(request_id)
    executor.die_if = lambda plan: False
    simulation.run()
    for request_id, last in simulation.last.items():
        assert last.fault is None, last.fault
        answer = simulation.tokens[request_id]
        params = simulation.requests[request_id].params
        right = simulation.expected(request_id, len(answer))
        if params.guide is not None:
            right = expected(simulation, request_id, compiler)
            found["guided"] += 1
            found["stopped"] += last.finish_reason == "stop"
            if params.logprobs is not None:
                assert len(simulation.logprobs[request_id]) == len(answer)
        assert answer == (right[: len(answer)] if last.finish_reason == "abort" else right), request_id
    found["preempted"] = simulation.counters.num_preemptions
    found["deaths"] = executor.num_deaths
    found["accepted"] = simulation.counters.num_accepted
    found["rejected"] = simulation.counters.num_drafts - simulation.counters.num_accepted
    return found


@pytest.mark.parametrize("shape", some(SHAPES, *(set(SHAPES) - {"device", "host ahead"})))
def test_guided_answers_depend_on_no_schedule(model: Path, compiler: Compiler, shape: str) -> None:
    found: Counter[str] = Counter()
    for seed in range(2):
        config = null_config(
            num_blocks=12, model=str(model), vocab_size=VOCAB_SIZE, max_num_seqs=6, max_model_len=160, **SHAPES[shape]
        )
        found += churn(Simulation(config), random.Random(seed), compiler, 40)
    assert min(found[name] for name in ("guided", "stopped", "preempted", "deaths")) > 0, found
    if "num_drafts" in SHAPES[shape]:
        assert min(found["accepted"], found["rejected"]) > 0, found


@pytest.mark.soak
def test_many_guided_answers_with_drafts(model: Path, compiler: Compiler) -> None:
    """500 schedules; drafts are forced tokens, looked up, or those of a program."""
    found: Counter[str] = Counter()
    for seed in range(500):
        rng = random.Random(seed)
        ngram = rng.choice((None, NgramConfig(shortest=1)))
        config = null_config(
            num_blocks=14,
            model=str(model),
            vocab_size=VOCAB_SIZE,
            max_num_seqs=6,
            max_model_len=160,
            traits=BackendTraits(max_drafts=5),
            num_drafts=rng.randint(1, 5),
            ngram=ngram,
            depth=rng.randint(1, 3),
        )
        found += churn(Simulation(config), rng, compiler, 20)
    names = ("guided", "stopped", "preempted", "deaths", "accepted", "rejected")
    assert min(found[name] for name in names) > 0, found


@pytest.mark.parametrize("shape", ["host", "host ahead", "device ahead", "drafts that are looked up"])
def test_a_row_that_waits_is_computed_again(
    model: Path, compiler: Compiler, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step waits for a guide, so rows are withheld whenever a thread is slower than a step."""
    monkeypatch.setattr(guides, "PATIENCE_S", 0.0)
    monkeypatch.setattr(guides, "TOKEN_S", 0.0)
    withheld = 0
    constrain = guides.RowGuides.constrain

    def counting(self: guides.RowGuides, rows: Any, num_drafts: Any = None) -> guides.StepConstraints | None:
        nonlocal withheld
        constraints = constrain(self, rows, num_drafts)
        withheld += 0 if constraints is None else len(constraints.withheld)
        return constraints

    monkeypatch.setattr(guides.RowGuides, "constrain", counting)
    config = null_config(num_blocks=40, model=str(model), vocab_size=VOCAB_SIZE, max_model_len=160, **SHAPES[shape])
    churn(Simulation(config), random.Random(5), compiler, 20)
    assert withheld > 0


def test_forced_tokens_take_no_steps_of_their_own(model: Path) -> None:
    """With log-probabilities each is sampled, but forced tokens are drafts that are always right."""
    steps = {}
    for logprobs, num_drafts in ((None, 0), (0, 0), (0, 4)):
        config = null_config(
            model=str(model),
            vocab_size=VOCAB_SIZE,
            traits=BackendTraits(max_drafts=4),
            num_drafts=num_drafts,
            ngram=NgramConfig(),
        )
        simulation = Simulation(config)
        text = "a text that leaves no choice"
        params = SamplingParams(
            temperature=0, max_tokens=60, logprobs=logprobs, guide=Guide(Grammar("regex", f"[ab]{text}"))
        )
        request_id = simulation.add([1, 2, 3], params=params, eos_token_ids=(END,))
        simulation.run()
        assert len(simulation.tokens[request_id]) == len(text) + 2
        steps[logprobs, num_drafts] = simulation.counters.num_steps
        assert simulation.counters.num_accepted == simulation.counters.num_drafts
    assert steps[None, 0] < 8 <= steps[0, 4] < 12 < len(text) < steps[0, 0]


@pytest.mark.parametrize(("shape", "depth"), [("host ahead", 3), ("device ahead", 1)])
def test_steps_are_planned_ahead_where_the_host_samples(model: Path, shape: str, depth: int) -> None:
    """A device needs what the guide tells before the step, so the last token must be known."""
    simulation = Simulation(null_config(model=str(model), vocab_size=VOCAB_SIZE, **SHAPES[shape]))
    params = SamplingParams(temperature=0, max_tokens=40, guide=Guide(Grammar("regex", "[a-z]{40}")))
    request_id = simulation.add([1, 2], params=params, eos_token_ids=(END,))
    in_flight = []
    while request_id not in simulation.last:
        simulation.turn()
        in_flight.append(simulation.core.scheduler.num_in_flight)
    assert max(in_flight) == depth and len(simulation.tokens[request_id]) == 40


def test_a_guide_that_cannot_be_followed_ends_its_request_only(model: Path) -> None:
    simulation = Simulation(null_config(model=str(model), vocab_size=VOCAB_SIZE))
    broken = SamplingParams(max_tokens=5, guide=Guide(Grammar("lark", "start: <unheard_of>")))
    bad = simulation.add([1], params=broken, eos_token_ids=(END,))
    good = simulation.add([2])
    simulation.run()
    fault = simulation.last[bad].fault
    assert fault is not None and (fault.status, fault.code) == (400, "invalid_grammar")
    simulation.assert_correct(good)
    assert simulation.executor.num_deaths == 0
