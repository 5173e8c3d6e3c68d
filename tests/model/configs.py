"""Contents of config.json: of a dense Qwen3 and of one with experts, and the shape of Qwen3-14B."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

QWEN3_14B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
}
RELEASED = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
    "eos_token_id": 151645,
}

MOE = RELEASED | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [3],
    "tie_word_embeddings": False,
}


def write(path: Path, config: dict[str, Any], **changes: Any) -> Path:
    """A directory with config.json; a change to `...` removes the key."""
    changed = {key: value for key, value in (config | changes).items() if value is not ...}
    (path / "config.json").write_text(json.dumps(changed))
    return path
