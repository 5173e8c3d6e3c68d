"""Small GGUF files, written by the gguf package from random models of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from tokenizers import pre_tokenizers
from transformers import PreTrainedModel

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
ARCHITECTURES |= {
    "qwen3_moe": "qwen3moe",
    "phi3": "phi3",
    "ministral3": "mistral3",
    "smollm3": "smollm3",
    "seed_oss": "seed_oss",
}
_INTERLEAVED = ("llama", "mistral3", "smollm3")
_JOINED = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
_EXPERT_PARTS = ("gate", "up", "down")
_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_HEADS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_MATRICES = {f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"} | {"self_attn.o_proj": "attn_output"}
_MLP = {f"mlp.{name}_proj": f"ffn_{name}" for name in _EXPERT_PARTS}


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of heads in the order of files of the architecture llama."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def tensors_of(kind: str, model: PreTrainedModel) -> dict[str, np.ndarray]:
    """The tensors of a file by name, float32."""
    weights = {name: value.float().numpy() for name, value in model.state_dict().items()}
    config, found = model.config, {}
    names = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}
    for name, value in weights.items():
        if name in names and not (name == "lm_head.weight" and config.tie_word_embeddings):
            found[f"{names[name]}.weight"] = value
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            module, _, end = rest.rpartition(".")
            norms = _NORMS | ({"post_attention_layernorm": "post_attention_norm"} if kind == "seed_oss" else {})
            for old, new in (norms | _HEADS | _MATRICES | _MLP | _JOINED).items():
                if module == old:
                    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(new)
                    moved = heads and ARCHITECTURES[kind] in _INTERLEAVED
                    found[f"blk.{layer}.{new}.{end}"] = interleaved(value, heads) if moved else value
            if rest == "mlp.gate.weight":
                found[f"blk.{layer}.ffn_gate_inp.weight"] = value
            if rest == "mlp.experts.gate_up_proj":
                half = value.shape[1] // 2
                found[f"blk.{layer}.ffn_gate_exps.weight"] = value[:, :half]
                found[f"blk.{layer}.ffn_up_exps.weight"] = value[:, half:]
            if rest == "mlp.experts.down_proj":
                found[f"blk.{layer}.ffn_down_exps.weight"] = value
    return found


def write_model(
    path: Path,
    kind: str,
    model: PreTrainedModel,
    type: Type = Type.F32,
    types: Mapping[str, str] | None = None,
    stored_in: Any = None,
    **changes: Any,
) -> Path:
    """Write a model with matrices of `type`, and a tokenizer of one token a byte; `changes` are of the metadata.

    `types` of some modules, which `stored_in` makes.
    """
    config, name = model.config, ARCHITECTURES[kind]
    writer = gguf.GGUFWriter(path, name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_key_length(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    if "moe" in kind or kind == "mixtral":
        writer.add_expert_count(getattr(config, "num_local_experts", None) or config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    add_tokenizer(writer, config.vocab_size)
    if config.rope_parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(model))
    add_scaling(writer, config.rope_parameters, config.max_position_embeddings)
    for tensor, value in tensors_of(kind, model).items():
        if special := (types or {}).get(tensor.removesuffix(".weight").rpartition(".")[2]):
            rows, _ = stored_in(special, value.reshape(-1, value.shape[-1]))
            writer.add_tensor(tensor, rows.reshape(*value.shape[:-1], -1), raw_dtype=Type[special])
        elif value.ndim == 1 or type == Type.F32:
            writer.add_tensor(tensor, value)
        else:
            stored = gguf.quants.quantize(value, type)
            writer.add_tensor(tensor, stored, raw_dtype=type)
    for key, value in changes.items():
        writer.add_key_value(key, *value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_scaling(writer: gguf.GGUFWriter, rope: dict[str, Any], length: int) -> None:
    """Write what files of Phi and Ministral 3 have of their RoPE."""
    trained = rope.get("original_max_position_embeddings")
    if rope["rope_type"] == "longrope":
        writer.add_rope_dimension_count(2 * len(rope["short_factor"]))
        writer.add_rope_scaling_orig_ctx_len(trained)
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(length / trained) / np.log(trained))))
        for name in ("short", "long"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(trained)
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def llama3_divisors(model: PreTrainedModel) -> np.ndarray:
    config, scaled = model.config, model.model.rotary_emb.inv_freq
    dim = 2 * len(scaled)
    plain = config.rope_parameters["rope_theta"] ** (-torch.arange(0, dim, 2).float() / dim)
    return (plain / scaled).numpy().astype(np.float32)


def add_tokenizer(writer: gguf.GGUFWriter, size: int) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    unused = [f"[unused{i}]" for i in range(size - len(alphabet) - len(special))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*alphabet, *special, *unused])
    writer.add_token_types([1] * len(alphabet) + [3] * len(special) + [5] * len(unused))
    writer.add_token_merges([])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(256)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
