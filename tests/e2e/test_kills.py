"""Streams continue on a respawned worker with the same tokens: greedy and seeded, float32 and bf16.

See test_formats_bit_by_bit.py for quantised weights and DeepSeek V4.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from pypto_serving.api.generation.request import encode_bad_words
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.engine.async_engine import AsyncEngine
from pypto_serving.types.request import RequestOutput
from pypto_serving.types.sampling import SamplingParams
from tests.checkpoints import make_checkpoint
from tests.e2e.changing import CHANGES
from tests.e2e.engines import FOR_KERNELS, QUICK_FAULTS, Killer, answers, engine_config, requests_of, run_engine

pytestmark = pytest.mark.e2e

NUM_STREAMS = 32


def streams(model: Path, max_tokens: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Half of the streams are greedy, half are sampled with their own seed; most change their logits."""
    rng, tokenizer = random.Random(3), Tokenizer.load(model)
    prompts = [rng.choices(range(250), k=rng.randrange(4, 90)) for _ in range(NUM_STREAMS)]
    common = {"top_p": 0.95, "max_tokens": max_tokens, "ignore_eos": True}
    given = [common | {"temperature": i % 2, "seed": i} | CHANGES[i % len(CHANGES)] for i in range(NUM_STREAMS)]
    params = [encode_bad_words(SamplingParams(**each), tokenizer) for each in given]
    return prompts, params


def survive(model: Path, kills: int, max_tokens: int, points: dict[str, list[object]]) -> None:
    prompts, params = streams(model, max_tokens)
    undisturbed = run_engine(engine_config(model), lambda engine: answers(engine, prompts, params))

    async def scenario(engine: AsyncEngine) -> list[list[int]]:
        killer = Killer(engine, kills, seed=kills, planned=[int(epoch) for epoch in points])
        found = await answers(engine, prompts, params, killer)
        assert engine.stats.max_step_rows > 1
        assert engine.stats.num_respawns == killer.killed + len(points) >= kills
        return found

    changes = {
        "faults": QUICK_FAULTS,
        "worker_module": "tests.faulty_worker",
        "backend_options": {"faults": points},
    }
    assert run_engine(engine_config(model, changes), scenario) == undisturbed
    assert len({tuple(answer) for answer in undisturbed}) == NUM_STREAMS


def test_streams_survive_kills(tmp_path: Path) -> None:
    """The worker dies in prefill, between sampling and commit, and while its successor loads."""
    points: dict[str, list[object]] = {"1": ["after", 3], "2": ["load", 0], "4": ["before", 2]}
    survive(make_checkpoint(tmp_path / "model", dtype="bfloat16"), kills=3, max_tokens=40, points=points)


@pytest.mark.soak  # nothing of it depends on the program
def test_streams_survive_a_kill_in_torch(tmp_path: Path) -> None:
    survive(make_checkpoint(tmp_path / "model"), kills=1, max_tokens=16, points={})


def test_a_stream_does_not_go_on_with_another_model(tmp_path: Path) -> None:
    """Its files changed before the worker died. The next request is answered."""
    model = make_checkpoint(tmp_path / "model", dtype="bfloat16")
    long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)

    async def scenario(engine: AsyncEngine) -> list[str]:
        faults: list[str] = []
        killed = False

        def kill(outputs: list[RequestOutput]) -> None:
            nonlocal killed
            faults.extend(output.fault.code for output in outputs if output.fault is not None)
            if not killed and engine.ready is not None:
                killed = True
                os.utime(model / "model.safetensors", (0, 0))
                os.kill(engine.ready.worker_pid, signal.SIGKILL)

        await engine.submit(requests_of([[5, 6, 7]], [long])).deliver_to(kill)
        assert await answers(engine, [[5, 6, 7]])
        return faults

    assert run_engine(engine_config(model, {"faults": QUICK_FAULTS}), scenario) == ["model_changed"]


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "deepseek_v4_fast"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_streams_survive_a_hundred_kills(tmp_path: Path, dtype: str, kind: str) -> None:
    points: dict[str, list[object]] = {}
    for epoch in range(2, 60, 6):
        points |= {str(epoch): ["load", 0], str(epoch + 2): ["after", 2 + epoch % 7], str(epoch + 4): ["before", 2]}
    model = make_checkpoint(tmp_path / "model", kind=kind, dtype=dtype, **FOR_KERNELS.get(kind, {}))
    survive(model, kills=100 - len(points), max_tokens=300, points=points)
