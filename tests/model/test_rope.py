"""Rotary frequencies against transformers' own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pypto_serving.errors import ModelError
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
    rope = Rope(kind="yarn", dim=4, theta=100.0, trained_len=8, factor=2.0, attention_factor=1.5)
    cos, sin = rope.tables(16)
    assert cos.shape == sin.shape == (16, 2)
    np.testing.assert_allclose(cos**2 + sin**2, 1.5**2, rtol=1e-5)
    assert cos[0].tolist() == [1.5, 1.5]


def _random_parameters(rng: np.random.Generator, kind: str) -> dict[str, Any]:
    """Return a section of `kind`, with each key that it may leave out in about half of all cases."""
    factor, low = float(rng.uniform(1, 12)), float(rng.uniform(0.5, 2))
    usual: dict[str, Any] = {"rope_type": kind, "rope_theta": float(rng.choice([1e4, 1.6e5, 5e5, 1e6]))}
    choices: dict[str, Any] = {}
    if kind != "default":
        usual["factor"] = factor
    if kind == "yarn":
        choices = {
            "original_max_position_embeddings": int(rng.integers(64, 4096)),
            "attention_factor": float(rng.uniform(0.5, 2)),
            "beta_fast": float(rng.uniform(8, 64)),
            "beta_slow": float(rng.uniform(0.5, 4)),
            "mscale": float(rng.uniform(0.1, 2)),
            "mscale_all_dim": float(rng.uniform(0.1, 2)),
            "truncate": bool(rng.integers(2)),
        }
    if kind == "llama3":
        usual |= {"low_freq_factor": low, "high_freq_factor": low + float(rng.uniform(1, 4))}
        choices = {"original_max_position_embeddings": int(rng.integers(64, 4096))}
    return usual | {key: value for key, value in choices.items() if rng.random() < 0.6}


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3"])
def test_random_parameters(kind: str) -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        given, dim = _random_parameters(rng, kind), int(rng.choice([16, 64, 80, 128]))
        raw = {"max_position_embeddings": 4096, "rope_theta": given["rope_theta"]}
        name = "rope_scaling" if rng.random() < 0.5 else "rope_parameters"
        if rng.random() < 0.5:
            del given["rope_theta"]
        if kind in ("yarn", "llama3") and rng.random() < 0.3:
            raw["original_max_position_embeddings"] = 1024
        spelt = {("type" if key == "rope_type" and rng.random() < 0.5 else key): value for key, value in given.items()}
        config = transformers.LlamaConfig(head_dim=dim, **raw, **{name: dict(spelt)})
        wanted, attention_factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=6000)
        rope = Rope.from_config(Fields(raw | {name: spelt}, "config.json"), dim, 4096)
        np.testing.assert_allclose(rope.frequencies(6000), wanted.numpy(), rtol=1e-6, err_msg=str(raw | given))
        assert rope.attention_factor == pytest.approx(attention_factor)
        assert not rope.unread


def _read(**scaling: Any) -> Rope:
    return Rope.from_config(Fields({"rope_scaling": scaling}, "config.json"), 64, 4096, in_part=True)


def test_attn_factor_multiplies_the_usual_factor() -> None:
    """DeepSeek-R1-0528-Qwen3-8B cancels the factor of YaRN by it."""
    released = YARN | {"attn_factor": 0.8782488562869419}
    assert _read(**released).attention_factor == pytest.approx(1.0)
    assert _read(**released, attention_factor=1.25).attention_factor == 1.25


def test_keys_that_only_other_kinds_read_are_named() -> None:
    rope = _read(rope_type="linear", factor=2, original_max_position_embeddings=512, beta_fast=32, finetuned=True)
    assert rope.unread == ("original_max_position_embeddings 512", "beta_fast 32")
    assert _read(rope_type="mrope", mrope_section=[16, 24, 24]) == _read()


@pytest.mark.parametrize("key", ["extrapolation_factor", "alpha", "factors"])
def test_numbers_of_unknown_meaning_are_refused(key: str) -> None:
    value = [2.0] if key == "factors" else 2.0
    with pytest.raises(ModelError, match=f"{key} is .*2.0.*, but must be absent: RoPE of type yarn does not read it"):
        _read(**YARN, **{key: value})
    assert _read(**YARN, **{key: 1}) == _read(**YARN)


def test_kinds_that_cannot_be_computed_are_refused() -> None:
    """Queries that grow are read with YaRN alone; NTK scaling has no exponent where a single pair is rotated."""
    with pytest.raises(ModelError, match=r"llama_4_scaling_beta is 0.1, but must be absent: RoPE of type default"):
        _read(rope_type="default", llama_4_scaling_beta=0.1)
    assert _read(rope_type="default", llama_4_scaling_beta=0).query_growth == 0
    with pytest.raises(ModelError, match='rope_type is "dynamic", but must be another'):
        _read(rope_type="dynamic", factor=2, partial_rotary_factor=2 / 64)
