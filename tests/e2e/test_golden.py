"""Greedy answers of the whole engine against transformers in float32, whatever happens to the requests."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from pypto_serving.engine.async_engine import AsyncEngine
from tests.checkpoints import make_checkpoint
from tests.deepseek_v4 import check_greedy
from tests.e2e.engines import GREEDY, QUICK_FAULTS, Killer, answers, engine_config, run_engine
from tests.model.sequences import Sequences, load_program
from tests.thinning import some

pytestmark = [pytest.mark.golden, pytest.mark.e2e]

CASES = {"qwen3": (10, 34), "qwen3_moe": (8, 30), "deepseek_v4_fast": (10, 34)}
"""Number of prompts, and blocks of history that are too few for them at once."""
SHARED = 40
SOME = pytest.mark.parametrize(
    "reference",
    ["qwen3", pytest.param("qwen3_moe", marks=pytest.mark.soak), "deepseek_v4_fast"],
    indirect=True,
    scope="module",
)
"""What the scheduler does is the same for both Qwen3."""
DENSE = pytest.mark.parametrize("reference", some(CASES, "qwen3"), indirect=True, scope="module")
"""Chunks and preemption of DeepSeek V4 are in test_draft_layer.py too."""


@dataclass(frozen=True)
class Reference:
    """A checkpoint, prompts of which every other shares a prefix, and what transformers answers."""

    model: Path
    prompts: list[list[int]]
    answers: list[list[int]]
    few_blocks: int


@pytest.fixture(scope="module", params=CASES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    model = make_checkpoint(tmp_path_factory.mktemp("model") / request.param, kind=request.param, dtype="float32")
    rng = random.Random(7)
    shared, count = rng.choices(range(250), k=SHARED), CASES[request.param][0]
    prompts = [(shared if i % 2 else []) + rng.choices(range(250), k=rng.randrange(1, 120)) for i in range(count)]
    return Reference(model, prompts, golden_answers(model, prompts), CASES[request.param][1])


def golden_answers(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    golden = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    if golden.config.model_type == "deepseek_v4":
        found = Sequences(load_program(model, threads=1)).continued(prompts, GREEDY.max_tokens or 0)
        check_greedy(golden, prompts, found)
        return found
    found = []
    for prompt in prompts:
        tokens, cache, step = list(prompt), None, torch.tensor([prompt])
        with torch.inference_mode():
            for _ in range(GREEDY.max_tokens or 0):
                output = golden(step, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                tokens.append(int(output.logits[0, -1].argmax()))
                step = torch.tensor([tokens[-1:]])
        found.append(tokens[len(prompt) :])
    return found


def check(reference: Reference, scenario: Any, changes: dict[str, Any] | None = None, **options: Any) -> None:
    run_engine(engine_config(reference.model, changes, **options), scenario)


@pytest.mark.soak  # every request is alone in test_bit_by_bit.py
def test_one_request_at_a_time(reference: Reference) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        assert await answers(engine, reference.prompts) == reference.answers
        assert engine.stats.max_step_rows == 1

    check(reference, scenario, max_num_seqs=1, prefix_caching=False)


@SOME
def test_batched_together_and_again_with_prefix_hits(reference: Reference) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        assert await answers(engine, reference.prompts) == reference.answers
        assert engine.stats.max_step_rows > len(reference.prompts) / 5
        hits = engine.stats.prefix_hits
        assert await answers(engine, reference.prompts) == reference.answers
        assert engine.stats.prefix_hits > hits + 20 * len(reference.prompts)

    check(reference, scenario)


@DENSE
def test_chunks(reference: Reference) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        assert await answers(engine, reference.prompts) == reference.answers
        assert engine.stats.num_steps > sum(map(len, reference.prompts)) / 11

    check(reference, scenario, max_num_batched_tokens=11, prefix_caching=False)


@DENSE
def test_forced_preemption(reference: Reference) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        assert await answers(engine, reference.prompts) == reference.answers
        assert engine.stats.num_preemptions > 0

    config = engine_config(reference.model)
    blocks = [
        min(reference.few_blocks, count) if group.keeps_history else count
        for group, count in zip(config.cache.groups, config.cache.num_blocks, strict=True)
    ]
    check(reference, scenario, changes={"num_blocks": tuple(blocks)})


@SOME
@pytest.mark.soak  # test_kills.py and test_draft_layer.py kill workers of these kinds
def test_killed_workers(reference: Reference) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        killer = Killer(engine, count=2, seed=1)
        assert await answers(engine, reference.prompts, on_output=killer) == reference.answers
        assert engine.stats.num_respawns == killer.killed == 2

    check(reference, scenario, changes={"faults": QUICK_FAULTS})
