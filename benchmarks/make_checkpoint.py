"""Write a checkpoint of random weights in a given shape, with a byte-level BPE tokenizer and a ChatML template.

    python benchmarks/make_checkpoint.py 0.6b DIR      596 M parameters, the shape of Qwen3-0.6B, 1.19 GB in bf16
    python benchmarks/make_checkpoint.py tiny DIR      4.2 M parameters, for what the control plane costs

Embedding rows of tokens that are not visible ASCII are scaled down, so that greedy output is visible text and does
not end early.
"""

from __future__ import annotations

import itertools
import json
import string
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

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
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HIDDEN_ROW_SCALE = 0.02


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level BPE whose merges build words of lower-case letters, shortest first, until the vocabulary is full."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for length in itertools.count(2):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            if len(vocab) == vocab_size - len(SPECIAL_TOKENS):
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
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def make_config(shape: dict[str, int], end: int) -> dict[str, Any]:
    """config.json, spelled as the released Qwen3 checkpoints spell it."""
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
    """Normal weights with variance 1 / fan-in; norms of ones. `visible`: bool [vocab]."""
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


def main(
    shape: Annotated[str, typer.Argument(help=f"One of {', '.join(SHAPES)}.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; made if missing.")],
) -> None:
    """Write a checkpoint of random weights."""
    if shape not in SHAPES:
        raise typer.BadParameter(f"{shape} is not one of {', '.join(SHAPES)}")
    sizes = SHAPES[shape]
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(sizes["vocab_size"])
    tokenizer.save(str(out / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    texts = (tokenizer.decode([i]) for i in range(sizes["vocab_size"]))
    visible = torch.tensor([bool(text) and all("!" <= char <= "~" for char in text) for text in texts])
    save_file(make_weights(sizes, visible), out / "model.safetensors", metadata={"format": "pt"})
    files = {
        "config.json": make_config(sizes, end),
        "generation_config.json": {"do_sample": False, "eos_token_id": end},
        "tokenizer_config.json": {"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE},
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
