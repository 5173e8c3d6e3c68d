"""Write a checkpoint of random weights in a given shape, with a byte-level BPE tokenizer and tokens for chats.

    python benchmarks/make_checkpoint.py 0.6b DIR      596 M parameters, the shape of Qwen3-0.6B, 1.19 GB in bf16
    python benchmarks/make_checkpoint.py tiny DIR      4.2 M parameters, to measure the control plane
    python benchmarks/make_checkpoint.py deepseek-v4-1b DIR   954 M parameters, 182 M active, layers of all kinds

Embedding rows of tokens other than visible ASCII are scaled down, so that greedy output is visible text and does not
end early.
"""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

from pypto_serving.api.chat.deepseek_v4 import BOS, EOS, NEEDED_TOKENS
from pypto_serving.model.deepseek_v4.config import DeepseekV4Config
from pypto_serving.model.deepseek_v4.inventory import model_tensors
from pypto_serving.model.deepseek_v4.released import FLASH

SHAPES: dict[str, dict[str, int]] = {
    "0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 4096,
    },
}
_LEFT_OUT = {"bos_token_id", "eos_token_id", "expert_dtype", "quantization_config"}
DEEPSEEK_V4_1B: dict[str, Any] = {key: value for key, value in FLASH.items() if key not in _LEFT_OUT} | {
    "vocab_size": 16384,
    "hidden_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "head_dim": 256,
    "q_lora_rank": 256,
    "o_lora_rank": 128,
    "compress_ratios": [0, 0, *[4, 128] * 7, 0],
    "index_n_heads": 32,
    "index_topk": 256,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "num_hash_layers": 2,
    "num_nextn_predict_layers": 0,
}
"""config.json of a small DeepSeek V4, with the keys of the release."""
QWEN_TOKENS = [AddedToken(token, special=True) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
DEEPSEEK_TOKENS = [AddedToken(token, special=token in (BOS, EOS)) for token in NEEDED_TOKENS]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HIDDEN_ROW_SCALE = 0.02
DEEPSEEK = "deepseek-v4-1b"


def make_tokenizer(vocab_size: int, added: Sequence[AddedToken]) -> Tokenizer:
    """Make a byte-level BPE. Merges build words of lower-case letters, shortest first, until the vocabulary is full."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for length in itertools.count(2):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            if len(vocab) == vocab_size - len(added):
                break
            word = "".join(letters)
            merges.append((word[:-1], word[-1]))
            vocab[word] = len(vocab)
        else:
            continue
        break
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(list(added))
    return tokenizer


def make_config(shape: dict[str, int], end: int) -> dict[str, Any]:
    """Return config.json with the keys of the released Qwen3 checkpoints."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "eos_token_id": end,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **shape,
    }


def make_weights(shape: dict[str, int], visible: torch.Tensor) -> dict[str, torch.Tensor]:
    """Draw normal weights with variance 1 / fan-in; norms are ones. `visible`: bool [vocab]."""
    hidden, inner, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    generator = torch.Generator().manual_seed(0)

    def normal(rows: int, columns: int) -> torch.Tensor:
        weights = torch.randn(rows, columns, generator=generator) * columns**-0.5
        return weights.to(torch.bfloat16)

    embeddings = normal(shape["vocab_size"], hidden)
    embeddings[~visible] *= HIDDEN_ROW_SCALE
    weights = {"model.embed_tokens.weight": embeddings, "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16)}
    for layer in tqdm(range(shape["num_hidden_layers"]), desc="layers"):
        prefix = f"model.layers.{layer}."
        for name, rows, columns in (
            ("self_attn.q_proj", queries, hidden),
            ("self_attn.k_proj", keys, hidden),
            ("self_attn.v_proj", keys, hidden),
            ("self_attn.o_proj", hidden, queries),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            weights[f"{prefix}{name}.weight"] = normal(rows, columns)
        for name, size in (
            ("input_layernorm", hidden),
            ("post_attention_layernorm", hidden),
            ("self_attn.q_norm", head),
            ("self_attn.k_norm", head),
        ):
            weights[f"{prefix}{name}.weight"] = torch.ones(size, dtype=torch.bfloat16)
    return weights


def make_deepseek_weights(config: dict[str, Any], visible: torch.Tensor) -> dict[str, torch.Tensor]:
    """Draw normal weights with variance 1 / fan-in for every tensor; norms and scales are ones."""
    generator = torch.Generator().manual_seed(0)
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in tqdm(model_tensors(DeepseekV4Config.from_json(config, "config.json")).items(), desc="tensors"):
        if tensor.role == "ids":
            order = torch.rand(tensor.shape[0], config["n_routed_experts"], generator=generator).argsort(dim=1)
            weights[name] = order[:, : tensor.shape[1]].contiguous()
            continue
        ones = name.endswith(("norm.weight", "_scale"))
        spread = tensor.shape[1] ** -0.5 if len(tensor.shape) > 1 else 0.1
        values = torch.ones(tensor.shape) if ones else torch.randn(tensor.shape, generator=generator) * spread
        weights[name] = values if tensor.role == "float" else values.to(torch.bfloat16)
    weights["head.weight"][~visible] *= HIDDEN_ROW_SCALE
    return weights


def main(
    shape: Annotated[str, typer.Argument(help=f"One of {', '.join((*SHAPES, DEEPSEEK))}.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; created if missing.")],
) -> None:
    """Write a checkpoint of random weights."""
    if shape not in (*SHAPES, DEEPSEEK):
        raise typer.BadParameter(f"{shape} is not one of {', '.join((*SHAPES, DEEPSEEK))}")
    deepseek = shape == DEEPSEEK
    sizes = DEEPSEEK_V4_1B if deepseek else SHAPES[shape]
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(sizes["vocab_size"], DEEPSEEK_TOKENS if deepseek else QWEN_TOKENS)
    tokenizer.save(str(out / "tokenizer.json"))
    end_token = EOS if deepseek else "<|im_end|>"
    end = tokenizer.token_to_id(end_token)
    texts = (tokenizer.decode([i]) for i in range(sizes["vocab_size"]))
    visible = torch.tensor([bool(text) and all("!" <= char <= "~" for char in text) for text in texts])
    weights = make_deepseek_weights(sizes, visible) if deepseek else make_weights(sizes, visible)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    files = {
        "config.json": {**sizes, "eos_token_id": end} if deepseek else make_config(sizes, end),
        "generation_config.json": {"do_sample": False, "eos_token_id": end},
        "tokenizer_config.json": {"eos_token": end_token} | ({} if deepseek else {"chat_template": CHAT_TEMPLATE}),
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
