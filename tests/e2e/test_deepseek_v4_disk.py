"""DeepSeek V4 over the disk tier: what one engine has computed, the next one resumes from, with the same tokens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pypto_serving.engine.async_engine import AsyncEngine
from pypto_serving.kernels.library import runnable
from pypto_serving.types.request import RequestOutput
from tests.checkpoints import make_checkpoint
from tests.e2e.engines import answers, engine_config, run_engine

pytestmark = pytest.mark.e2e


def test_the_next_engine_resumes_at_the_last_checkpoint_of_a_prompt(tmp_path: Path) -> None:
    """The slowest kernels make computing slower than loading."""
    model = make_checkpoint(tmp_path / "model", kind="deepseek_v4", dtype="bfloat16", o_lora_rank=32)
    kernels = "portable" if runnable() else "torch"
    config = engine_config(model, kv_memory="32MiB", max_model_len=1024, kernels=kernels, kv_disk=tmp_path / "kv")
    prompt = random.Random(4).choices(range(250), k=700)
    cached: list[tuple[int, ...]] = []

    async def scenario(engine: AsyncEngine) -> list[list[int]]:
        def note(output: RequestOutput) -> None:
            if output.finish_reason:
                cached.append(tuple(output.cached_by_tier))

        return await answers(engine, [prompt], on_output=note)

    first, second = (run_engine(config, scenario) for _ in range(2))
    assert second == first
    assert cached == [(0, 0, 0, 0), (0, 0, 640, 0)]
