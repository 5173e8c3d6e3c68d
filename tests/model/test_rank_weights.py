"""The weights of ranks: together those of the model, and what every rank has whole."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from pypto_serving.model.null_models import FLASH
from pypto_serving.model.registry import Serving, model_family
from pypto_serving.parallel.topology import Topology
from pypto_serving.types.model import ModelSpec

QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "attention_bias": True,
    "tie_word_embeddings": True,
}
EXPERTS = {"model_type": "qwen3_moe", "moe_intermediate_size": 768, "num_experts": 128, "tie_word_embeddings": False}
NORMS = 4 * (3 * (2 * 2048 + 2 * 128) + 2048)
"""Bytes, in float32."""
TABLE = 151936 * 2048


@functools.cache
def spec_of(name: str) -> ModelSpec:
    architecture, raw = MODELS[name]
    family = model_family(architecture)
    config = family.parse(raw, "config.json")
    return family.spec(config, Serving(dtype="bfloat16"), {})


def held(spec: ModelSpec, topology: Topology) -> list[int]:
    assert spec.parts is not None
    return [spec.parts.weight_bytes(rank) for rank in topology.ranks]


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Qwen3ForCausalLM", QWEN3),
    "untied": ("Qwen3ForCausalLM", QWEN3 | {"tie_word_embeddings": False}),
    "experts": ("Qwen3MoeForCausalLM", QWEN3 | EXPERTS),
    "deepseek_v4": ("DeepseekV4ForCausalLM", FLASH),
}


@pytest.mark.parametrize("name", MODELS)
def test_one_rank_has_all_weights(name: str) -> None:
    assert held(spec_of(name), Topology()) == [spec_of(name).packed_bytes]


@pytest.mark.parametrize("tensor", [2, 4])
def test_ranks_repeat_norms_only(tensor: int) -> None:
    sizes = held(spec_of("dense"), Topology(tensor=tensor))
    assert sum(sizes) == spec_of("dense").packed_bytes + (tensor - 1) * NORMS
    assert max(sizes) == min(sizes)


def test_ranks_that_share_a_kv_head_have_it_twice() -> None:
    keys = 3 * 2 * (4 * 128) * (2 * 2048 + 4)
    assert sum(held(spec_of("dense"), Topology(tensor=8))) == spec_of("dense").packed_bytes + 7 * NORMS + keys


def test_ranks_repeat_routers() -> None:
    repeated = NORMS + 2 * 3 * 128 * 2048
    for topology in (Topology(tensor=4), Topology(tensor=4, expert=4), Topology(tensor=4, expert=2)):
        assert sum(held(spec_of("experts"), topology)) == spec_of("experts").packed_bytes + 3 * repeated


def test_stages_have_their_layers_and_a_tied_table_twice() -> None:
    first, middle, last = held(spec_of("untied"), Topology(pipeline=3))
    assert first + middle + last == spec_of("untied").packed_bytes
    assert first - middle == 2 * TABLE and last - middle == 2 * TABLE + 4 * 2048
    assert sum(held(spec_of("dense"), Topology(pipeline=3))) == spec_of("dense").packed_bytes + 2 * TABLE


def test_experts_of_deepseek_v4_are_split() -> None:
    spec = spec_of("deepseek_v4")
    whole = held(spec, Topology(tensor=2))
    assert held(spec, Topology(tensor=2, expert=2)) == whole
    assert sum(whole) < 1.05 * spec.packed_bytes
