"""A request whose logits are not finite ends alone: the worker lives, and the others get their tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from pypto_serving.engine.async_engine import AsyncEngine
from pypto_serving.types.request import RequestOutput
from pypto_serving.types.tokens import unpack_ids
from tests.checkpoints import make_checkpoint
from tests.e2e.engines import GREEDY, answers, engine_config, requests_of, run_engine

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_broken_embedding_fails_its_own_request(tmp_path: Path, dtype: str) -> None:
    model = make_checkpoint(tmp_path / "model", dtype=dtype, tie_word_embeddings=False)
    prompts = [[i, i + 1, i + 2] for i in range(0, 40, 4)]
    expected = run_engine(engine_config(model), lambda engine: answers(engine, prompts))
    broken = max(set(range(320)).difference(*prompts, *expected))
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][broken] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})

    async def scenario(engine: AsyncEngine) -> None:
        found: dict[str, list[RequestOutput]] = {}

        def take(outputs: list[RequestOutput]) -> None:
            for output in outputs:
                found.setdefault(output.request_id, []).append(output)

        requests = requests_of([[1, broken, 2], *prompts], [GREEDY] * (len(prompts) + 1))
        await engine.submit(requests).deliver_to(take)
        fault = found["q0"][-1].fault
        assert fault is not None and (fault.status, fault.code) == (500, "not_finite")
        for i, tokens in enumerate(expected, 1):
            assert [t for output in found[f"q{i}"] for t in unpack_ids(output.token_ids).tolist()] == tokens
        assert engine.ready is not None and engine.ready.epoch == 1, "the worker was started again"

    run_engine(engine_config(model), scenario)
