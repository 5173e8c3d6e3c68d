"""Models without weights, for the null backend. Torch-free."""

from __future__ import annotations

from pypto_serving.model.deepseek_v4.config import FLASH, DeepseekV4Config
from pypto_serving.model.deepseek_v4.spec import kv_groups
from pypto_serving.types.kv import DEFAULT_BLOCK_SIZE, FullSpec, KVCacheGroupSpec, KVTensorSpec
from pypto_serving.types.model import ModelSpec

NULL_MODELS = ("plain", "deepseek_v4")
"""Names of the models, the default first."""


def plain_groups(block_size: int) -> tuple[KVCacheGroupSpec, ...]:
    """Describe one full-history group of 28 layers, with rows as wide as those of Qwen3-0.6B."""
    rows = KVTensorSpec(name="kv", layers=tuple(range(28)), dtype="bfloat16", row_shape=(2048,))
    return (FullSpec(name="kv", block_size=block_size, tensors=(rows,)),)


def deepseek_v4_groups() -> tuple[KVCacheGroupSpec, ...]:
    """Describe the six groups of DeepSeek V4 Flash in bfloat16, as they are served."""
    return kv_groups(_flash(), "bfloat16")


def null_spec(name: str = NULL_MODELS[0], block_size: int = DEFAULT_BLOCK_SIZE) -> ModelSpec:
    """Describe the model `name`, one of NULL_MODELS; only groups of `plain` have blocks of `block_size`."""
    return _deepseek_v4_spec() if name == "deepseek_v4" else _plain_spec(block_size)


def _plain_spec(block_size: int) -> ModelSpec:
    """Describe a model of the size of Qwen3-0.6B."""
    return ModelSpec(
        path="",
        architecture="Null",
        dtype="bfloat16",
        num_layers=28,
        vocab_size=151936,
        max_position_embeddings=40960,
        num_parameters=0,
        weight_bytes=0,
        kv_groups=plain_groups(block_size),
    )


def _deepseek_v4_spec() -> ModelSpec:
    """Describe a model of the size of DeepSeek V4 Flash."""
    flash = _flash()
    return ModelSpec(
        path="",
        architecture="Null",
        dtype="bfloat16",
        num_layers=flash.num_layers,
        vocab_size=flash.vocab_size,
        max_position_embeddings=flash.max_position_embeddings,
        num_parameters=0,
        weight_bytes=0,
        own_blocks=True,
        kv_groups=deepseek_v4_groups(),
    )


def _flash() -> DeepseekV4Config:
    return DeepseekV4Config.from_json(FLASH, "DeepSeek V4 Flash")
