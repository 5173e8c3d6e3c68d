"""Models without weights, for the null backend. Torch-free."""

from __future__ import annotations

from pypto_serving.model.deepseek_v4.config import DeepseekV4Config
from pypto_serving.model.deepseek_v4.groups import kv_groups
from pypto_serving.model.deepseek_v4.released import FLASH
from pypto_serving.types.kv import KVCacheGroupSpec, KVTensorSpec
from pypto_serving.types.model import ModelSpec

NULL_MODELS = ("plain", "deepseek_v4")
"""Names of the models, the default first."""


def plain_groups(block_size: int = 16) -> tuple[KVCacheGroupSpec, ...]:
    """Describe one full-history group of 28 layers, with rows as wide as those of Qwen3-0.6B."""
    rows = KVTensorSpec(name="kv", layers=tuple(range(28)), dtype="bfloat16", row_shape=(2048,))
    return (KVCacheGroupSpec(name="kv", kind="full", block_size=block_size, tensors=(rows,)),)


def deepseek_v4_groups() -> tuple[KVCacheGroupSpec, ...]:
    """Describe the six groups of DeepSeek V4 Flash in bfloat16, as they are served."""
    return kv_groups(_flash(), "bfloat16")


def null_spec(name: str = NULL_MODELS[0]) -> ModelSpec:
    """Describe the model `name`, one of NULL_MODELS."""
    flash = _flash() if name == "deepseek_v4" else None
    return ModelSpec(
        path="",
        architecture="Null",
        dtype="bfloat16",
        num_layers=flash.num_layers if flash else 28,
        vocab_size=flash.vocab_size if flash else 151936,
        max_position_embeddings=flash.max_position_embeddings if flash else 40960,
        num_parameters=0,
        weight_bytes=0,
        kv_groups=deepseek_v4_groups() if flash else plain_groups(),
    )


def _flash() -> DeepseekV4Config:
    return DeepseekV4Config.from_json(FLASH, "DeepSeek V4 Flash")
