"""Qwen3 on the kernels, in whole engines on the fake device: right tokens, and the same ones in any company."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from pypto_serving.backend.cuda.backend import CudaBackend
from pypto_serving.kernels.cuda.tiles import num_splits
from pypto_serving.model.registry import read_config
from tests.backend.cuda.programs import answers, config_for, shortfall, tiny_checkpoint

pytestmark = pytest.mark.usefixtures("short_splits")
PROMPTS = [np.random.default_rng(i).integers(0, 256, length).tolist() for i, length in enumerate((21, 3, 9))]


@pytest.mark.parametrize(
    "overrides", [{}, {"attention_bias": True, "tie_word_embeddings": False, "num_hidden_layers": 1}]
)
def test_tokens_are_those_of_transformers_in_any_company(tmp_path: Path, overrides: dict[str, object]) -> None:
    """Or as good as the best, but for what bfloat16 rounds away."""
    path = tiny_checkpoint(tmp_path / "tiny", **overrides)
    alone = answers(path, PROMPTS)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for prompt, output in zip(PROMPTS, alone, strict=True):
        assert shortfall(model, prompt, output) < 0.05
    assert answers(path, PROMPTS, budget=11, together=True) == alone


def test_logits_of_a_small_vocabulary_are_one_part(tmp_path: Path) -> None:
    """Where the sum of another matrix of this shape would have two."""
    path = tiny_checkpoint(tmp_path / "tiny", hidden_size=512, num_hidden_layers=1)
    launches = CudaBackend(config_for(path)).launches(read_config(path))
    numbers = [(each.grid, [value for value in each.arguments if isinstance(value, int)]) for each in launches]
    of_logits = [grid for grid, values in numbers if 272 in values and 512 in values]
    assert num_splits(272, 512) == 2 and of_logits and {splits for *_, splits in of_logits} == {1}
