"""Rotary frequencies against transformers' own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pypto_serving.model.fields import Fields
from pypto_serving.model.rope import Rope

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "dynamic", "factor": 2.0},
        YARN,
        YARN | {"attention_factor": 1.5, "beta_fast": 16, "beta_slow": 2},
        YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False},
        YARN | {"factor": None},
        {"rope_type": "yarn", "factor": 2.0},
    ],
)
@pytest.mark.parametrize("max_model_len", [512, 4096, 6000])
def test_frequencies_are_those_of_transformers(scaling: dict[str, Any], max_model_len: int) -> None:
    parameters = scaling | {"rope_theta": 1e6}
    config = transformers.Qwen3Config(
        head_dim=128,
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=4096,
        rope_parameters=dict(parameters),
    )
    wanted, attention_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu", seq_len=max_model_len)
    rope = Rope.from_config(Fields({"rope_parameters": parameters}, "config.json"), 128, 4096)
    np.testing.assert_array_max_ulp(rope.frequencies(max_model_len), wanted.numpy(), 2)
    assert rope.attention_factor == pytest.approx(attention_factor)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
def test_nearly_all_frequencies_are_the_same_to_the_last_bit(kind: str) -> None:
    """Both raise theta to a power in their own way; everything else rounds alike."""
    count = odd = 0
    for theta in (123.0, 500.0, 1e4, 1.6e5, 5e5, 1e6, 1e7):
        for dim in (16, 32, 64, 128):
            parameters = {"rope_type": kind, "factor": 3.0, "rope_theta": theta}
            config = transformers.Qwen3Config(
                head_dim=dim, max_position_embeddings=4096, rope_parameters=dict(parameters)
            )
            wanted = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=6000)[0].numpy()
            rope = Rope.from_config(Fields({"rope_parameters": parameters}, "config.json"), dim, 4096)
            count, odd = count + len(wanted), odd + int((rope.frequencies(6000) != wanted).sum())
    assert odd < count / 50


def test_tables_hold_the_attention_factor() -> None:
    rope = Rope(kind="yarn", head_dim=4, theta=100.0, trained_len=8, factor=2.0, attention_factor=1.5)
    cos, sin = rope.tables(16)
    assert cos.shape == sin.shape == (16, 2)
    np.testing.assert_allclose(cos**2 + sin**2, 1.5**2, rtol=1e-5)
    assert cos[0].tolist() == [1.5, 1.5]
