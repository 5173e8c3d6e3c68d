"""Tiny random checkpoints that `transformers` and the engine both load, with a byte-level tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pypto_serving.model.openmp  # noqa: F401

# isort: split
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests import deepseek_v4

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NUM_BYTES = 256

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

QWEN3: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": True,
    "attention_bias": False,
    "bos_token_id": NUM_BYTES,
    "eos_token_id": NUM_BYTES + 2,
}
QWEN3_MOE: dict[str, Any] = QWEN3 | {
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
    "tie_word_embeddings": False,
}
LLAMA: dict[str, Any] = QWEN3 | {
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "rms_norm_eps": 1e-5,
}
QWEN2: dict[str, Any] = QWEN3 | {"num_attention_heads": 2, "num_key_value_heads": 1}
"""Heads of hidden_size / num_attention_heads."""
MISTRAL: dict[str, Any] = QWEN3 | {"tie_word_embeddings": False, "sliding_window": None, "rms_norm_eps": 1e-5}
MINISTRAL3: dict[str, Any] = MISTRAL | {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
MIXTRAL: dict[str, Any] = MISTRAL | {"num_local_experts": 8, "num_experts_per_tok": 2}
PHI3: dict[str, Any] = QWEN3 | {
    "hidden_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "short_factor": [1 + i / 16 for i in range(16)],
        "long_factor": [1 + i / 2 for i in range(16)],
        "original_max_position_embeddings": 128,
    },
    "original_max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
}
SMOLLM3: dict[str, Any] = QWEN3 | {"no_rope_layer_interval": 2, "mlp_bias": True, "pad_token_id": 0}
SEED_OSS: dict[str, Any] = QWEN3 | {"tie_word_embeddings": False, "attention_bias": True, "pad_token_id": 0}
DEEPSEEK_V4 = {"deepseek_v4": deepseek_v4.TINY, "deepseek_v4_fast": deepseek_v4.FAST}
DECODERS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "qwen3": (QWEN3, transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "qwen3_moe": (QWEN3_MOE, transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    "llama": (LLAMA, transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (QWEN2, transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "mistral": (MISTRAL, transformers.MistralConfig, transformers.MistralForCausalLM),
    "mixtral": (MIXTRAL, transformers.MixtralConfig, transformers.MixtralForCausalLM),
    "ministral3": (MINISTRAL3, transformers.Ministral3Config, transformers.Ministral3ForCausalLM),
    "smollm3": (SMOLLM3, transformers.SmolLM3Config, transformers.SmolLM3ForCausalLM),
    "seed_oss": (SEED_OSS, transformers.SeedOssConfig, transformers.SeedOssForCausalLM),
    "phi3": (PHI3, transformers.Phi3Config, transformers.Phi3ForCausalLM),
}
KINDS = (*DECODERS, *DEEPSEEK_V4)


def make_checkpoint(
    path: Path,
    kind: str = "qwen3",
    dtype: str = "float32",
    seed: int = 0,
    sharded: bool = False,
    through: str = "float32",
    **overrides: Any,
) -> Path:
    """Write a random checkpoint of `kind` (see `KINDS`) to `path`; `overrides` change its config.

    Weights are wide enough for diverse greedy outputs. `sharded` writes several files and an index. `through` is a
    dtype that weights are rounded to before they become `dtype`.
    """
    model = random_model(kind, seed, **overrides).to(getattr(torch, through)).to(getattr(torch, dtype))
    model.config.dtype = dtype
    if kind in DEEPSEEK_V4:
        deepseek_v4.write_checkpoint(path, model, DEEPSEEK_V4[kind] | overrides, dtype, seed)
    else:
        model.save_pretrained(path, max_shard_size="100KB" if sharded else "5GB")
    write_tokenizer(path)
    eos = {"eos_token_id": model.config.eos_token_id, "bos_token_id": model.config.bos_token_id}
    (path / "generation_config.json").write_text(json.dumps(eos))
    return path


def random_model(kind: str = "qwen3", seed: int = 0, **overrides: Any) -> transformers.PreTrainedModel:
    """The `transformers` model, float32, that `make_checkpoint` writes."""
    if kind in DEEPSEEK_V4:
        return deepseek_v4.random_model(seed, **(DEEPSEEK_V4[kind] | overrides))
    defaults, config_class, model_class = DECODERS[kind]
    config = config_class(**json.loads(json.dumps(defaults | overrides)))
    with torch.device("meta"):
        model = model_class(config)
    model = model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.1 if parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5
            parameter.normal_(0.0, spread, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(1.0)
    rotary = model.model.rotary_emb
    rotary.__init__(config)
    model.tie_weights()
    return model.eval()


def with_dtype(model: transformers.PreTrainedModel, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """The model with rounded weights, in place; the frequencies of its positions are as good as new."""
    model.to(dtype)
    for module in model.modules():
        if hasattr(module, "inv_freq") or hasattr(module, "main_inv_freq"):
            module.__init__(model.config)
    return model


def byte_ids(text: str) -> tuple[int, ...]:
    """The ids of printable ASCII text, without spaces, in the tokenizer of `write_tokenizer`."""
    return tuple(ord(char) - ord("!") for char in text)


def write_tokenizer(path: Path) -> None:
    """A tokenizer with one token per byte and ChatML's special tokens behind them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    assert len(alphabet) == NUM_BYTES
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[0],
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
