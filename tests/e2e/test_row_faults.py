"""A request whose logits are not finite ends alone: the worker lives, and the others get their tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from pypto_serving.engine.async_engine import AsyncEngine
from pypto_serving.types.arrays import unpack_ids
from pypto_serving.types.request import RequestOutput
from tests.checkpoints import make_checkpoint
from tests.e2e.engines import GREEDY, answers, engine_config, requests_of, run_engine

pytestmark = pytest.mark.e2e


BROKEN = 319


def broken_checkpoint(folder: Path, dtype: str) -> Path:
    """A checkpoint whose embedding of token BROKEN is not finite."""
    model = make_checkpoint(folder, dtype=dtype, tie_word_embeddings=False)
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][BROKEN] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    return model


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.soak)])
def test_a_broken_embedding_fails_its_own_request(tmp_path: Path, dtype: str) -> None:
    prompts = [[i, i + 1, i + 2] for i in range(0, 40, 4)]
    sound = make_checkpoint(tmp_path / "sound", dtype=dtype, tie_word_embeddings=False)
    expected = run_engine(engine_config(sound), lambda engine: answers(engine, prompts))
    assert BROKEN not in {token for tokens in (*prompts, *expected) for token in tokens}

    async def scenario(engine: AsyncEngine) -> None:
        found: dict[str, list[RequestOutput]] = {}

        def take(outputs: list[RequestOutput]) -> None:
            for output in outputs:
                found.setdefault(output.request_id, []).append(output)

        requests = requests_of([[1, BROKEN, 2], *prompts], [GREEDY] * (len(prompts) + 1))
        await engine.submit(requests).deliver_to(take)
        fault = found["q0"][-1].fault
        assert fault is not None and (fault.status, fault.code) == (500, "not_finite")
        for i, tokens in enumerate(expected, 1):
            assert [t for output in found[f"q{i}"] for t in unpack_ids(output.token_ids).tolist()] == tokens
        assert engine.ready is not None and engine.ready.epoch == 1, "the worker was started again"

    run_engine(engine_config(broken_checkpoint(tmp_path / "model", dtype)), scenario)


def test_nothing_of_a_failed_prompt_is_found_again(tmp_path: Path) -> None:
    """Its first chunks were published before the fault showed; they may be corrupt too."""
    prompt = [*range(256), BROKEN]

    async def scenario(engine: AsyncEngine) -> None:
        found: list[RequestOutput] = []
        for tokens in (prompt, prompt[:-1]):
            await engine.submit(requests_of([tokens], [GREEDY])).deliver_to(found.extend)
        fault = next(output.fault for output in found if output.finish_reason == "error")
        assert fault is not None and fault.code == "not_finite"
        assert found[-1].finish_reason == "length" and found[-1].num_cached_tokens == 0

    config = engine_config(broken_checkpoint(tmp_path / "model", "bfloat16"), max_num_batched_tokens=64)
    run_engine(config, scenario)
