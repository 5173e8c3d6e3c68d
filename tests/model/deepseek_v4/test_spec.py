"""What is read from config.json: layers, tensors and cache families, and errors that name key and value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pypto_serving.errors import ModelError
from pypto_serving.model.deepseek_v4.config import DeepseekV4Config
from pypto_serving.model.deepseek_v4.inventory import DeepseekV4Inventory
from pypto_serving.model.deepseek_v4.spec import kv_groups, model_spec
from pypto_serving.model.null_models import FLASH, deepseek_v4_groups
from pypto_serving.model.registry import Serving, load_spec, read_config
from tests.compressed import quantization_config
from tests.model.deepseek_v4.configs import PLAIN_FLASH, PRO

EXPERT = "layers.4.ffn.experts.3.w1"
W8A8 = quantization_config(["head"])
SMALL_RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}
FULL_NAMES = {
    "swa": "sliding_attention",
    "csa": "compressed_sparse_attention",
    "hca": "heavily_compressed_attention",
}


def config_of(config: dict[str, Any] = FLASH, **changes: Any) -> DeepseekV4Config:
    """A change to `...` removes the key."""
    return DeepseekV4Config.from_json({k: v for k, v in (config | changes).items() if v is not ...}, "config.json")


@pytest.mark.parametrize(
    ("config", "parameters", "with_mtp", "tensors", "size"),
    [
        (FLASH, 284_332_240_471, 290_942_289_362, 69_187, 159_609_485_896),
        (PRO, None, 1_598_837_347_742, 145_116, 864_704_792_696),
    ],
    ids=["flash", "pro"],
)
def test_totals_are_the_published_ones(
    config: dict[str, Any], parameters: int | None, with_mtp: int, tensors: int, size: int
) -> None:
    inventory = DeepseekV4Inventory(config_of(config))
    stored = inventory.stored()
    assert (len(stored), sum(tensor.num_bytes for tensor in stored.values())) == (tensors, size)
    assert inventory.num_parameters(mtp=True) == with_mtp
    assert parameters in (None, inventory.num_parameters())


def test_a_released_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FLASH))
    spec = load_spec(tmp_path)
    assert (spec.architecture, spec.dtype, spec.num_layers) == ("DeepseekV4ForCausalLM", "bfloat16", 43)
    assert (spec.num_parameters, spec.max_position_embeddings) == (284_332_240_471, 1 << 20)
    assert spec.quantization == "fp8 with fp4 experts" and not spec.needs_torch
    contents = read_config(tmp_path).contents()
    assert (contents.source, contents.index, contents.verdicts) == ("config.json", None, ())
    assert sum(tensors.num_bytes for tensors in contents.tensors) == 159_609_485_896
    assert [tensors.dtype for tensors in contents.tensors] == ["I8", "F8_E8M0", "F8_E4M3", "BF16", "F32", "I64"]
    assert (contents.num_parameters, contents.num_parameters_with_drafts) == (284_332_240_471, 290_942_289_362)


@pytest.mark.parametrize(
    ("changes", "form", "scales"),
    [
        ({}, ("I8", (2048, 2048)), ("F8_E8M0", (2048, 128))),
        ({"expert_dtype": "fp8"}, ("F8_E4M3", (2048, 4096)), ("F32", (16, 32))),
        ({"expert_dtype": ...}, ("F8_E4M3", (2048, 4096)), ("F8_E8M0", (16, 32))),
    ],
    ids=["released", "base", "repackaged"],
)
def test_experts_of_releases(changes: dict[str, Any], form: Any, scales: Any) -> None:
    """Base models have float32 scales, in all layers."""
    stored = DeepseekV4Inventory(config_of(**changes)).stored()
    for name, (dtype, shape) in ((f"{EXPERT}.weight", form), (f"{EXPERT}.scale", scales)):
        assert (stored[name].dtype, stored[name].shape) == (dtype, shape)
    assert stored["layers.0.attn.wo_a.scale"].dtype == scales[0]
    assert stored["layers.0.attn.wo_a.scale"].shape == (64, 32)


def test_the_form_in_int8() -> None:
    """As pypto-lib converts to it: scales are called `scale`, and latents are plain."""
    model = config_of(expert_dtype=..., quantization_config=W8A8)
    stored = DeepseekV4Inventory(model).stored()
    assert (stored[f"{EXPERT}.scale"].dtype, stored[f"{EXPERT}.scale"].shape) == ("F32", (2048,))
    assert stored["layers.2.attn.indexer.wq_b.weight"].dtype == stored["mtp.0.e_proj.weight"].dtype == "I8"
    assert stored["layers.0.attn.wq_a.weight"].dtype == "BF16" and "layers.0.attn.wq_a.scale" not in stored
    spec = model_spec(model, Serving("bfloat16"), {})
    assert spec.quantization == "int8" and not spec.needs_torch
    assert 15.9e9 < spec.token_bytes < 16.3e9
    odd = W8A8 | {"config_groups": {"group_0": W8A8["config_groups"]["group_0"] | {"format": "pack-quantized"}}}
    with pytest.raises(ModelError, match="num_bits is 8"):
        config_of(quantization_config=odd)


def test_what_a_token_reads() -> None:
    """As counted from the release: fp8 5.86, fp4 6.49, bf16 .36 GB (elements), and the output layer."""
    assert 11.0e9 < model_spec(config_of(), Serving("bfloat16"), {}).token_bytes < 11.4e9
    assert 26.0e9 < model_spec(config_of(PLAIN_FLASH), Serving("bfloat16"), {}).token_bytes < 27.0e9


def test_a_plain_checkpoint_of_the_same_shape() -> None:
    model = config_of(PLAIN_FLASH)
    spec = model_spec(model, Serving("bfloat16"), {})
    assert not spec.quantization and not spec.needs_torch
    assert 2 * spec.num_parameters < spec.weight_bytes < 2.01 * spec.num_parameters
    inventory = DeepseekV4Inventory(model)
    tensors = inventory.tensors()
    assert tensors["layers.2.attn.compressor.ape"] == (4, 1024)
    assert tensors["layers.3.attn.compressor.ape"] == (128, 512)
    assert tensors["layers.2.attn.indexer.compressor.wkv.weight"] == (256, 4096)
    assert tensors["layers.42.attn.wo_a.weight"] == (8192, 4096)
    assert "layers.0.ffn.gate.tid2eid" in tensors and "layers.3.ffn.gate.bias" in tensors
    assert not any(name.startswith("mtp.") for name in tensors) and inventory.ignores("mtp.0.norm.weight")


def test_the_groups_of_a_release_are_those_of_the_scheduler_tests() -> None:
    groups = kv_groups(config_of(), "bfloat16")
    assert groups == deepseek_v4_groups()
    assert [group.name for group in groups] == ["ori", "cmp", "idx", "hca_state", "csa_state", "csa_inner_state"]
    assert [group.block_size for group in groups] == [128, 128, 128, 16, 4, 4]
    assert (groups[2].tensors[0].row_shape, groups[2].tensors[0].ratio) == ((128,), 4)
    assert groups[0].tensors[0].layers == tuple(range(43))
    assert [t.layers[:2] for t in groups[1].tensors] == [(2, 4), (3, 5)]
    assert sum(g.block_bytes / g.block_size for g in groups if g.keeps_history) == 6880


@pytest.mark.parametrize(
    ("kinds", "names", "block_size"),
    [
        (("swa", "swa"), ["ori"], 16),
        (("csa", "csa"), ["ori", "cmp", "idx", "csa_state", "csa_inner_state"], 16),
        (("hca", "hca"), ["ori", "cmp", "hca_state"], 24),
        (("swa", "hca"), ["ori", "cmp", "hca_state"], 24),
        (("hca", "csa"), ["ori", "cmp", "idx", "hca_state", "csa_state", "csa_inner_state"], 24),
    ],
)
def test_a_model_without_some_kinds(kinds: tuple[str, ...], names: list[str], block_size: int) -> None:
    model = config_of(
        compress_ratios=...,
        layer_types=[FULL_NAMES[kind] for kind in kinds],
        compress_rates=SMALL_RATES | {"heavily_compressed_attention": 24},
        num_hidden_layers=2,
        sliding_window=16,
    )
    groups = kv_groups(model, "float32")
    assert [group.name for group in groups] == names
    assert groups[0].block_size == block_size


@pytest.mark.parametrize(("ratio", "state_block"), [(4, 4), (6, 6), (16, 16), (24, 12), (17, 1), (128, 16)])
def test_state_blocks_divide_the_ratio(ratio: int, state_block: int) -> None:
    model = config_of(compress_ratios=[0, ratio], compress_rate_hca=ratio, compress_rate_csa=3, num_hidden_layers=2)
    state = kv_groups(model, "bfloat16")[-1]
    assert (state.name, state.block_size, state.period) == ("hca_state", state_block, ratio)


def test_the_spelling_of_transformers_means_the_same() -> None:
    model = config_of(PLAIN_FLASH)
    parameters = {key: value for key, value in FLASH["rope_scaling"].items() if key != "type"}
    same = config_of(
        PLAIN_FLASH,
        compress_ratios=...,
        rope_scaling=...,
        num_hash_layers=...,
        qk_rope_head_dim=...,
        topk_method=...,
        layer_types=[FULL_NAMES[kind] for kind in model.kinds],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        mlp_layer_types=["hash_moe"] * 3 + ["moe"] * 40,
        partial_rotary_factor=0.125,
        rope_parameters={
            "main": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.125},
            "compress": parameters
            | {"rope_type": "yarn", "rope_theta": 160000.0, "partial_rotary_factor": 0.125, "attention_factor": 1.0},
        },
    )
    assert same == model
    assert (model.rope.kind, model.compress_rope.kind, model.compress_rope.attention_factor) == ("default", "yarn", 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "deepseek_v41"}, ["model_type", "deepseek_v41", "deepseek_v4"]),
        ({"model_type": "deepseek_v4_dspark"}, ["model_type", "deepseek_v4_dspark"]),
        ({"compress_ratios": ...}, ["compress_ratios", "missing"]),
        ({"compress_ratios": [0, 4]}, ["compress_ratios", "43"]),
        ({"compress_ratios": [8] * 43}, ["compress_ratios", "8", "0, 128, 4"]),
        ({"layer_types": ["full_attention"] * 43}, ["layer_types", "full_attention", "sliding_attention"]),
        ({"num_key_value_heads": 2}, ["num_key_value_heads", "2", "1"]),
        ({"n_shared_experts": 2}, ["n_shared_experts", "2"]),
        ({"scoring_func": "softmax"}, ["scoring_func", "softmax", "sqrtsoftplus"]),
        ({"topk_method": "greedy"}, ["topk_method", "greedy"]),
        ({"norm_topk_prob": False}, ["norm_topk_prob", "false"]),
        ({"n_group": 8}, ["n_group", "8"]),
        ({"attention_bias": True}, ["attention_bias", "true"]),
        ({"tie_word_embeddings": True}, ["tie_word_embeddings", "true"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"o_groups": 7}, ["o_groups", "7"]),
        ({"qk_rope_head_dim": 63}, ["qk_rope_head_dim", "63"]),
        ({"index_head_dim": 32}, ["index_head_dim", "32", "64"]),
        ({"index_topk": ...}, ["index_topk", "missing"]),
        ({"num_experts_per_tok": 257}, ["num_experts_per_tok", "257", "256"]),
        ({"n_routed_experts": 10**9}, ["n_routed_experts", "1000000000", "at most"]),
        ({"num_nextn_predict_layers": 10**9}, ["num_nextn_predict_layers", "from 0 to 43"]),
        ({"mlp_layer_types": ["dense"] * 43}, ["mlp_layer_types", "dense", "hash_moe"]),
        ({"mlp_layer_types": [["moe"]] * 43}, ["mlp_layer_types", '["moe"]']),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope_type", "linear", "yarn"]),
        ({"rope_scaling": {"main": 3, "compress": {}}}, ["main", "3", "object"]),
        ({"hc_mult": 0}, ["hc_mult", "0"]),
        ({"swiglu_limit": ...}, ["swiglu_limit", "missing"]),
        ({"expert_dtype": "fp6"}, ["expert_dtype", "fp6"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["quant_method", "awq"]),
        ({"architectures": ["DeepseekV41ForCausalLM"]}, ["DeepseekV41ForCausalLM"]),
        ({"architectures": ["DeepseekV4DSparkForCausalLM"]}, ["DeepseekV4DSparkForCausalLM"]),
    ],
)
def test_errors_name_key_and_value(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    changed = {key: value for key, value in (FLASH | changes).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    with pytest.raises(ModelError) as caught:
        read_config(tmp_path)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), str(caught.value)
