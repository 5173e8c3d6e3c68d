"""What is read from config.json: both generations of spelling, and errors that name key and value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, MixtralConfig, Phi3Config, SeedOssConfig, SmolLM3Config

from pypto_serving.errors import ModelError
from pypto_serving.model.decoder.inventory import DecoderInventory
from pypto_serving.model.decoder.recipe import ExpertsRecipe
from pypto_serving.model.registry import Serving, load_spec, model_family, read_config
from tests.model.configs import MOE, RELEASED, write


def test_a_released_config(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, RELEASED))
    assert (spec.architecture, spec.dtype, spec.num_layers) == ("Qwen3ForCausalLM", "bfloat16", 28)
    assert (spec.max_position_embeddings, spec.eos_token_ids) == (40960, (151645,))
    assert spec.num_parameters == 596_049_920
    assert spec.weight_bytes == 2 * (596_049_920 + 151936 * 1024)
    (group,) = spec.kv_groups
    assert (group.name, group.kind, group.block_size) == ("kv", "full", 32)
    assert [(t.name, t.dtype, t.row_shape, len(t.layers)) for t in group.tensors] == [
        ("k", "bfloat16", (8, 128), 28),
        ("v", "bfloat16", (8, 128), 28),
    ]


def test_both_spellings_mean_the_same(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir(), new.mkdir()
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32768}
    write(old, MOE, rope_scaling=yarn | {"type": "yarn"})
    parameters = yarn | {"rope_type": "yarn", "rope_theta": 1000000}
    respelled = {
        "rope_theta": ...,
        "rope_scaling": ...,
        "rope_parameters": parameters,
        "torch_dtype": ...,
        "dtype": "bfloat16",
    }
    write(new, MOE, **respelled, num_experts=..., num_local_experts=8)
    assert read_config(old).model == read_config(new).model
    assert load_spec(old).dtype == load_spec(new).dtype == "bfloat16"
    assert load_spec(old).max_position_embeddings == 131072


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({"use_sliding_window": True}, 40960),
        ({"use_sliding_window": True, "max_window_layers": 27}, 512),
        ({"use_sliding_window": True, "model_type": "qwen3_moe", "num_experts": 0}, 512),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": 28}, 40960),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": 21}, 512),
        ({"layer_types": ["sliding_attention"]}, 512),
        ({"use_sliding_window": True, "layer_types": ["full_attention"]}, 40960),
        ({}, 40960),
        ({"architectures": ["MistralForCausalLM"]}, 512),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, 40960),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": ...}, 4096),
        (
            {
                "architectures": ["Mistral3ForConditionalGeneration"],
                "sliding_window": ...,
                "text_config": {"sliding_window": None},
            },
            40960,
        ),
        ({"architectures": ["LlamaForCausalLM"]}, 40960),
    ],
)
def test_models_with_a_window_are_served_up_to_its_length(tmp_path: Path, changes: dict[str, Any], length: int) -> None:
    spec = load_spec(write(tmp_path, RELEASED, **{"sliding_window": 512} | changes))
    assert spec.max_position_embeddings == length
    assert spec.window == (length if length < 40960 else 0)


@pytest.mark.parametrize(
    ("architecture", "theirs"),
    [
        ("LlamaForCausalLM", LlamaConfig),
        ("MistralForCausalLM", MistralConfig),
        ("MixtralForCausalLM", MixtralConfig),
        ("Phi3ForCausalLM", Phi3Config),
        ("SmolLM3ForCausalLM", SmolLM3Config),
        ("SeedOssForCausalLM", SeedOssConfig),
    ],
)
def test_absent_keys_have_the_values_of_transformers(tmp_path: Path, architecture: str, theirs: Any) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 16, "head_dim": 32, "max_position_embeddings": 8192}
    sizes |= {"intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 320}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"architectures": [architecture]}))
    wanted, found = theirs(**sizes), read_config(tmp_path).model
    assert found.num_kv_heads == wanted.num_key_value_heads
    assert found.rms_norm_eps == wanted.rms_norm_eps
    assert found.attention.rope.theta == wanted.rope_parameters["rope_theta"]
    assert found.tied_embeddings == wanted.tie_word_embeddings
    assert found.max_position_embeddings == (getattr(wanted, "sliding_window", None) or 8192)


def test_expert_layers(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, MOE, num_hidden_layers=6)).model
    experts = [isinstance(layer.mlp, ExpertsRecipe) for layer in config.layers]
    assert experts == [False, True, False, False, False, True], "every second layer, but not layer 3"
    tensors = DecoderInventory(config).tensors()
    assert tensors["model.layers.1.mlp.gate.weight"] == (8, 1024)
    assert tensors["model.layers.1.mlp.experts.7.down_proj.weight"] == (1024, 768)
    assert tensors["model.layers.0.mlp.gate_proj.weight"] == (3072, 1024)
    assert "model.layers.3.mlp.gate.weight" not in tensors
    assert "lm_head.weight" in tensors


@pytest.mark.parametrize(
    ("stored", "wanted", "served"),
    [
        ("float32", "auto", "float32"),
        ("float16", "auto", "bfloat16"),
        ("bfloat16", "float32", "float32"),
        ("float32", "bfloat16", "bfloat16"),
        (..., "auto", "float32"),
    ],
)
def test_serving_dtype(tmp_path: Path, stored: Any, wanted: str, served: str) -> None:
    spec = load_spec(write(tmp_path, RELEASED, torch_dtype=stored), Serving(wanted))
    assert spec.dtype == spec.kv_groups[0].tensors[0].dtype == served


def test_head_dim_defaults_to_a_share_of_the_hidden_size(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, RELEASED, head_dim=...)).model
    assert config.head_dim == 64


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 40960),
        ({"rope_type": "linear", "factor": 2.0}, 81920),
        ({"rope_type": "dynamic", "factor": 2.0}, 81920),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        ({"rope_type": "yarn", "factor": 1.25, "original_max_position_embeddings": 32768}, 40960),
        ({"rope_type": "yarn", "factor": 2.0}, 81920),
    ],
)
def test_longest_sequence(tmp_path: Path, scaling: Any, longest: int) -> None:
    assert load_spec(write(tmp_path, RELEASED, rope_scaling=scaling)).max_position_embeddings == longest


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"hidden_size": -8}, ["hidden_size", "-8"]),
        ({"hidden_size": "big"}, ["hidden_size", "big"]),
        ({"hidden_size": 10**400}, ["hidden_size", "at most 2147483647"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers", "1000000000", "at most 1024"]),
        ({"vocab_size": ...}, ["vocab_size", "missing"]),
        ({"eos_token_id": [10**400]}, ["eos_token_id", "at most 2147483647"]),
        ({"num_attention_heads": 15}, ["num_key_value_heads", "8", "15"]),
        ({"head_dim": 33}, ["head_dim", "33"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps", "0"]),
        ({"rms_norm_eps": 10**400}, ["rms_norm_eps", "float32"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps", "NaN"]),
        ({"use_sliding_window": True, "max_window_layers": 0, "sliding_window": -1}, ["sliding_window", "-1"]),
        ({"layer_types": ["sliding_attention"]}, ["sliding_window", "missing"]),
        ({"layer_types": ["linear_attention"]}, ["layer_types", "linear_attention"]),
        ({"layer_types": True}, ["layer_types", "true"]),
        ({"layer_types": [["full_attention"]]}, ["layer_types", '[["full_attention"]]']),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"quantization_config": {"quant_method": "quark"}}, ["quantization_config.quant_method", "quark"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "yes"]),
        ({"rope_scaling": {"rope_type": "spiral"}}, ["rope_type", "spiral", "longrope"]),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1]}}, ["short_factor", "[1]", "64 positive"]),
        ({"rope_scaling": {"rope_type": "none"}}, ["rope_type", "none"]),
        ({"partial_rotary_factor": 1.5}, ["partial_rotary_factor", "1.5", "head_dim, 128"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["factor", "missing"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0.5}}, ["factor", "0.5"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e37}}, ["factor", "1e+37", "at most 1048576"]),
        ({"rope_scaling": {"rope_type": "yarn", "attention_factor": "x"}}, ["attention_factor", '"x"']),
        ({"rope_scaling": {"rope_type": "yarn", "mscale": [1], "mscale_all_dim": 1}}, ["mscale", "[1]"]),
        ({"rope_scaling": {"rope_type": "yarn"}, "original_max_position_embeddings": "x"}, ["original_max", '"x"']),
        ({"rope_scaling": {"rope_type": "yarn", "rope_theta": 10**400}}, ["rope_theta", "float32"]),
        ({"rope_scaling": [1]}, ["rope_scaling", "[1]"]),
        ({"rope_theta": -1}, ["rope_theta", "-1"]),
        ({"torch_dtype": "int8"}, ["dtype", "int8"]),
        ({"architectures": []}, ["architectures"]),
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "DeepseekV4ForCausalLM, LlamaForCausalLM"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2, "partial_rotary_factor": 0.5}}, ["partial_r", "whole"]),
    ],
)
def test_errors_name_key_and_value(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        load_spec(write(tmp_path, RELEASED, **changes))
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts": ...}, ["num_experts", "missing"]),
        ({"num_experts": 10**9}, ["num_experts", "1000000000", "from 0 to 4681"]),
        ({"num_experts": ..., "num_local_experts": -1}, ["num_local_experts is -1"]),
        ({"num_experts_per_tok": 9}, ["config.json: num_experts_per_tok is 9", "8"]),
        ({"mlp_only_layers": ["3"]}, ["mlp_only_layers", "3"]),
    ],
)
def test_expert_errors(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        load_spec(write(tmp_path, MOE, **changes))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_directory_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="must hold an object"):
        load_spec(tmp_path)


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="float16"):
        load_spec(write(tmp_path, RELEASED), Serving("float16"))


def test_families_are_found_by_architecture() -> None:
    assert model_family("Qwen3MoeForCausalLM") is model_family("Qwen3ForCausalLM")
    with pytest.raises(ModelError, match="Gpt"):
        model_family("Gpt")
