"""Qwen3 on the kernels, in whole engines on the fake device: right tokens, and the same ones in any company."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from pypto_serving.backend.cuda.backend import CudaBackend
from pypto_serving.kernels.cuda.products import _few_rows, _many_rows
from pypto_serving.kernels.cuda.tiles import num_splits
from pypto_serving.model.registry import read_config
from tests.backend.cuda.programs import answers, config_for, shortfall, tiny_checkpoint

pytestmark = pytest.mark.usefixtures("short_splits")
PROMPTS = [np.random.default_rng(i).integers(0, 256, length).tolist() for i, length in enumerate((21, 9))]


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({}, marks=pytest.mark.soak),
        {"attention_bias": True, "tie_word_embeddings": False, "num_hidden_layers": 1},
    ],
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
    products = [each for each in launches if each.kernel in (_few_rows, _many_rows)]
    of_logits = [each for each in products if {272, 512} <= {n for n in each.arguments if isinstance(n, int)}]
    splits = {each.grid[2] if each.kernel is _few_rows else each.arguments[-1] for each in of_logits}
    assert num_splits(272, 512) == 2 and splits == {1}
