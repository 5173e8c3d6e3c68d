"""Configurations of DeepSeek V4 that derive from the released one."""

from __future__ import annotations

from typing import Any

from pypto_serving.model.null_models import FLASH

PRO: dict[str, Any] = FLASH | {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
    "index_topk": 1024,
    "n_routed_experts": 384,
    "moe_intermediate_size": 3072,
    "routed_scaling_factor": 2.5,
}
PLAIN_FLASH: dict[str, Any] = {key: FLASH[key] for key in FLASH if key not in ("expert_dtype", "quantization_config")}
