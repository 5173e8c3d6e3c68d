"""Qwen3 on the kernels, in whole engines on the fake device: right tokens, and the same ones in any company."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from pypto_serving.kernels.cuda import attention
from pypto_serving.types.sampling import SamplingParams
from tests.backend.cuda.programs import FakeProgram, config_for, simulate, tiny_checkpoint

GREEDY = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
PROMPTS = [np.random.default_rng(i).integers(0, 256, length).tolist() for i, length in enumerate((21, 3, 9))]


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Contexts of a few tokens have several tiles and splits."""
    monkeypatch.setattr(attention, "SPLIT", 16)
    monkeypatch.setattr(attention, "TILE", 16)
    yield


def answers(path: Path, budget: int, together: bool) -> list[list[int]]:
    config = config_for(path, max_model_len=64, max_num_batched_tokens=budget, max_num_seqs=4, num_blocks=(6,))
    simulation, names = simulate(config, FakeProgram), []
    for prompt in PROMPTS:
        names.append(simulation.add(prompt, params=GREEDY))
        if not together:
            simulation.run()
    simulation.run()
    return [simulation.tokens[name] for name in names]


@pytest.mark.parametrize(
    "overrides", [{}, {"attention_bias": True, "tie_word_embeddings": False, "num_hidden_layers": 1}]
)
def test_tokens_are_those_of_transformers_in_any_company(tmp_path: Path, overrides: dict[str, object]) -> None:
    """Or as good as the best, but for what bfloat16 rounds away."""
    path = tiny_checkpoint(tmp_path / "tiny", **overrides)
    alone = answers(path, 64, False)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for prompt, output in zip(PROMPTS, alone, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        best, chosen = logits.max(-1).values, logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        assert (best - chosen).max() < 0.05 * logits.std()
    assert answers(path, 11, True) == alone
