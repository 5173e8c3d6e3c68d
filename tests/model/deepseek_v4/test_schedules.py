"""Greedy answers of a whole replica on the torch program, under any schedule: transformers' own, token by token.

Requests share prefixes, are preempted, aborted and resumed from the prefix cache and from host memory, and workers
die. Each life of a worker begins with pages full of NaN.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pypto_serving.backend.cpu import CpuBackend
from pypto_serving.config import EngineConfig
from pypto_serving.model.registry import load_spec
from pypto_serving.types.sampling import SamplingParams
from pypto_serving.types.tier import TierConfig
from tests.checkpoints import make_checkpoint, random_model
from tests.deepseek_v4 import check_greedy
from tests.model.sequences import Sequences, load_program, poison
from tests.simulation import Simulation

pytestmark = pytest.mark.golden

LONGEST, OUTPUT = 70, 24
NUM_BLOCKS = (26, 14, 14, 60, 110, 110)
"""Of ori, cmp, idx, hca_state, csa_state, csa_inner_state: too few for all requests at once."""
NUM_SLOTS = (40, 60, 60, 1, 40, 40)


@dataclass
class Oracle:
    """A model, prompts of which many share a beginning, and what transformers answers to each, greedily."""

    model: Path
    prompts: list[list[int]]
    answers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    program: Any = None

    def make_program(self, config: EngineConfig) -> Any:
        """The program of the largest configuration, loaded once; its pages are NaN again."""
        if self.program is None:
            self.program = CpuBackend(config).prepare(lambda *_: None)
        poison(self.program, [range(count) for count in self.program.num_blocks])
        self.program.limits = config.limits
        return self.program

    def config(self, **changes: Any) -> EngineConfig:
        spec = load_spec(self.model)
        return EngineConfig(
            model=str(self.model),
            backend="cpu",
            dtype="float32",
            vocab_size=spec.vocab_size,
            groups=spec.kv_groups,
            num_blocks=NUM_BLOCKS,
            max_model_len=LONGEST + OUTPUT,
            num_threads=1,
            **({"max_num_seqs": 6, "max_num_batched_tokens": 64} | changes),
        )


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    path = make_checkpoint(tmp_path_factory.mktemp("model") / "v4", "deepseek_v4_fast")
    rng = random.Random(5)
    families = [rng.choices(range(256), k=LONGEST) for _ in range(2)]
    cuts = [(family, rng.randrange(0, LONGEST - 8), rng.randrange(1, 8)) for family in families for _ in range(4)]
    prompts = [[*family[:shared], *rng.choices(range(256), k=own)] for family, shared, own in cuts]
    prompts += families
    answers = Sequences(load_program(path, threads=1, max_model_len=LONGEST + OUTPUT)).continued(prompts, OUTPUT)
    check_greedy(random_model("deepseek_v4_fast"), prompts, answers)
    return Oracle(path, prompts, {tuple(p): answer for p, answer in zip(prompts, answers, strict=True)})


def run_schedule(oracle: Oracle, seed: object, requests: int, deaths: float, tiered: bool) -> Simulation:
    """Random traffic in random steps; every answer must be the oracle's."""
    rng = random.Random(f"{seed}")
    tiers = (TierConfig(tier="host", size_bytes=0, num_slots=NUM_SLOTS),) if tiered else ()
    config = oracle.config(
        tiers=tiers,
        depth=rng.choice((1, 2)),
        max_num_batched_tokens=rng.choice((7, 16, 64, 120)),
        kv_store=rng.choice(("through", "eviction")),
    )
    oracle.make_program(msgspec.structs.replace(oracle.config(), max_num_batched_tokens=120))
    simulation = Simulation(config, make_program=oracle.make_program)
    simulation.executor.delay = lambda: rng.choice((0, 0, 1, 3))
    simulation.executor.die_if = lambda plan: rng.random() < deaths
    wanted, aborted = {}, set()
    for _ in range(requests):
        prompt = rng.choice(oracle.prompts)
        length = rng.randrange(1, OUTPUT + 1)
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        request_id = simulation.add(prompt, params=params)
        wanted[request_id] = oracle.answers[tuple(prompt)][:length]
        for _ in range(rng.randrange(0, 8)):
            simulation.turn()
        if rng.random() < 0.1:
            aborted.add(request_id)
            simulation.abort(request_id)
    simulation.executor.die_if = lambda plan: False
    simulation.run()
    for request_id, output in simulation.last.items():
        assert output.fault is None, output.fault
        answer = simulation.tokens[request_id]
        assert answer == wanted[request_id][: len(answer)]
        assert request_id in aborted or answer == wanted[request_id]
    simulation.executor.stop()
    return simulation


def cached(simulation: Simulation) -> dict[str, int]:
    """Prompt tokens that came from the device's and the host's cache."""
    outputs = simulation.last.values()
    return {
        "device": sum(sum(output.cached_by_tier[:1]) for output in outputs),
        "host": sum(sum(output.cached_by_tier[1:2]) for output in outputs),
    }


def soak(oracle: Oracle, seeds: range, requests: int) -> None:
    totals = {"device": 0, "host": 0, "preemptions": 0, "deaths": 0}
    for seed in seeds:
        simulation = run_schedule(oracle, seed, requests, deaths=0.02 * (seed % 2), tiered=seed % 3 > 0)
        for tier, count in cached(simulation).items():
            totals[tier] += count
        totals["preemptions"] += simulation.counters.num_preemptions
        totals["deaths"] += simulation.executor.num_deaths
    assert all(totals.values()), totals


def test_some_schedules(oracle: Oracle) -> None:
    soak(oracle, range(4), requests=20)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_two_hundred_schedules(oracle: Oracle) -> None:
    soak(oracle, range(1000, 1200), requests=20)
