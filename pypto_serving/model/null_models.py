"""Models without weights, for the null backend. Torch-free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pypto_serving.model.deepseek_v4.config import DeepseekV4Config
from pypto_serving.model.deepseek_v4.spec import kv_groups
from pypto_serving.types.kv import DEFAULT_BLOCK_SIZE, FullSpec, KVCacheGroupSpec, KVTensorSpec
from pypto_serving.types.model import ModelSpec

NULL_MODELS = ("plain", "deepseek_v4")
"""Names of the models, the default first."""
FLASH: dict[str, Any] = json.loads((Path(__file__).parents[1] / "assets/deepseek_v4_flash.json").read_text("utf-8"))
"""The config.json of DeepSeek V4 Flash."""


def plain_groups(block_size: int) -> tuple[KVCacheGroupSpec, ...]:
    """Describe one full-history group of 28 layers, with rows as wide as those of Qwen3-0.6B."""
    rows = KVTensorSpec(name="kv", layers=tuple(range(28)), dtype="bfloat16", row_shape=(2048,))
    return (FullSpec(name="kv", block_size=block_size, tensors=(rows,)),)


def deepseek_v4_groups() -> tuple[KVCacheGroupSpec, ...]:
    """Describe the six groups of DeepSeek V4 Flash in bfloat16, as they are served."""
    return kv_groups(_flash(), "bfloat16")


def null_spec(name: str = NULL_MODELS[0], block_size: int = DEFAULT_BLOCK_SIZE) -> ModelSpec:
    """Describe the model `name`, one of NULL_MODELS; only groups of `plain` have blocks of `block_size`."""
    if name == "deepseek_v4":
        flash, groups = _flash(), deepseek_v4_groups()
        layers, vocab, positions = flash.num_layers, flash.vocab_size, flash.max_position_embeddings
    else:
        groups = plain_groups(block_size)
        layers, vocab, positions = 28, 151936, 40960  # the size of Qwen3-0.6B
    return ModelSpec(
        path="",
        architecture="Null",
        dtype="bfloat16",
        num_layers=layers,
        vocab_size=vocab,
        max_position_embeddings=positions,
        num_parameters=0,
        weight_bytes=0,
        own_blocks=name == "deepseek_v4",
        kv_groups=groups,
    )


def _flash() -> DeepseekV4Config:
    return DeepseekV4Config.from_json(FLASH, "DeepSeek V4 Flash")
