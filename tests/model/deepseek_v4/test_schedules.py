"""Greedy answers of a whole replica on the torch program, under any schedule: transformers' own, token by token.

Requests share prefixes, are preempted, aborted and resumed from the prefix cache, from host memory and from a disk that
outlives the replica, and workers die. Each life of a worker begins with pages full of NaN.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pypto_serving.backend.cpu import CpuBackend
from pypto_serving.config import EngineConfig
from pypto_serving.model.registry import load_spec
from pypto_serving.types.sampling import SamplingParams
from pypto_serving.types.tier import TIERS, TierConfig
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


def tiers_of(seed: int, disk: Path) -> tuple[TierConfig, ...]:
    """None, host memory, the disk, or both."""
    host = TierConfig(tier="host", size_bytes=0, num_slots=NUM_SLOTS)
    slots = tuple(2 * count for count in NUM_SLOTS)
    below = TierConfig(tier="disk", size_bytes=1 << 30, num_slots=slots, place=str(disk))
    return ((), (host,), (below,), (host, below))[seed % 4]


def run_schedule(
    oracle: Oracle, seed: object, requests: int, deaths: float, tiers: tuple[TierConfig, ...]
) -> Simulation:
    """Random traffic in random steps; every answer must be the oracle's."""
    rng = random.Random(f"{seed}")
    config = oracle.config(
        tiers=tiers,
        depth=rng.choice((1, 2)),
        max_num_batched_tokens=rng.choice((7, 16, 64, 120)),
        kv_store=rng.choice(("through", "eviction")),
    )
    oracle.make_program(msgspec.structs.replace(oracle.config(), max_num_batched_tokens=120))
    simulation = Simulation(config, make_program=oracle.make_program)
    executor = simulation.executor
    executor.delay = lambda: rng.choice((0, 0, 1, 3))
    executor.die_if = lambda plan: executor.num_deaths < 2 and rng.random() < deaths  # at the third a request fails
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
    executor.die_if = lambda plan: False
    simulation.run()
    for request_id, output in simulation.last.items():
        assert output.fault is None, output.fault
        answer = simulation.tokens[request_id]
        assert answer == wanted[request_id][: len(answer)]
        assert request_id in aborted or answer == wanted[request_id]
    executor.stop()
    return simulation


def soak(oracle: Oracle, seeds: range, requests: int, disk: Path) -> None:
    """One replica after the other; those with a disk find what earlier ones left there."""
    totals: Counter[str] = Counter()
    for seed in seeds:
        simulation = run_schedule(oracle, seed, requests, 0.02 * (seed // 4 % 2), tiers_of(seed, disk))
        for output in simulation.last.values():
            totals.update(dict(zip(TIERS, output.cached_by_tier, strict=False)))  # none where nothing ran
        totals["preemptions"] += simulation.counters.num_preemptions
        totals["deaths"] += simulation.executor.num_deaths
    assert all(totals[name] for name in ("device", "host", "disk", "preemptions", "deaths")), totals


def test_some_schedules(oracle: Oracle, tmp_path: Path) -> None:
    soak(oracle, range(2, 8), requests=16, disk=tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_two_hundred_schedules(oracle: Oracle, tmp_path: Path) -> None:
    soak(oracle, range(1000, 1200), requests=20, disk=tmp_path)
