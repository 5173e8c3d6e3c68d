"""Overrides of config.json for random models."""

from __future__ import annotations

from typing import Any

VARIANTS: dict[str, dict[str, Any]] = {
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 1e4,
            "original_max_position_embeddings": 128,
        },
        "max_position_embeddings": 160,
    },
    "untied-biased": {"tie_word_embeddings": False, "attention_bias": True},
    "one-query-per-key": {"num_key_value_heads": 4, "head_dim": 16},
    "three-queries-per-key": {"num_key_value_heads": 1, "num_attention_heads": 3},
}
EXPERT_VARIANTS: list[dict[str, Any]] = [
    {"norm_topk_prob": False},
    {"decoder_sparse_step": 2, "mlp_only_layers": []},
]
WIDE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 64}
