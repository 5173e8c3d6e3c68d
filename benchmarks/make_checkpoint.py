"""Write a checkpoint of random weights in a given shape, with a byte-level BPE tokenizer and tokens for chats.

    python benchmarks/make_checkpoint.py 0.6b DIR      596 M parameters, the shape of Qwen3-0.6B, 1.19 GB in bf16
    python benchmarks/make_checkpoint.py tiny DIR      4.2 M parameters, to measure the control plane
    python benchmarks/make_checkpoint.py tiny-moe DIR  8.1 M parameters, 8 experts
    python benchmarks/make_checkpoint.py 1b-moe DIR    957 M parameters, 32 experts, 252 M active
    python benchmarks/make_checkpoint.py 14b DIR --format w4a16 --group-size 128
    python benchmarks/make_checkpoint.py 30b-a3b DIR --format w4a16
    python benchmarks/make_checkpoint.py deepseek-v4-1b DIR   954 M parameters, 182 M active, layers of all kinds
    python benchmarks/make_checkpoint.py deepseek-v4-1b-agreeing DIR   its draft layer always predicts what it says

Formats are those of `convert`, and fp8; codes and scales are drawn as they are stored, in little memory. Output rows of
tokens other than visible ASCII are scaled down, so that greedy output is visible text and does not end early.
"""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from random_weights import CODES, Tensor, chosen, identity, keyed, normal, ones, quantised, write_weights
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pypto_serving.api.chat.deepseek_v4 import BOS, EOS, NEEDED_TOKENS
from pypto_serving.model.convert.rounding import mxfp4, w4a16, w8a8
from pypto_serving.model.decoder.convert import plan_conversion
from pypto_serving.model.decoder.inventory import EMBEDDING, DecoderInventory
from pypto_serving.model.deepseek_v4.config import DeepseekV4Config
from pypto_serving.model.deepseek_v4.inventory import draft_tensors, model_tensors
from pypto_serving.model.families import qwen3
from pypto_serving.model.formats.quantization import SECTION
from pypto_serving.model.formats.schemes import PLAIN
from pypto_serving.model.null_models import FLASH

MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "head_dim": 128,
    "tie_word_embeddings": False,
}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    "14b": {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    "30b-a3b": MOE
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 151936,
    },
    "1b-moe": MOE
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "moe_intermediate_size": 512,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 32768,
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
    "tiny-moe": MOE
    | {
        "hidden_size": 256,
        "intermediate_size": 768,
        "moe_intermediate_size": 256,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 4096,
        "tie_word_embeddings": True,
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
    "num_nextn_predict_layers": 1,
}
"""config.json of a small DeepSeek V4, with the keys of the release."""
QWEN_END = "<|im_end|>"
QWEN_TOKENS = [AddedToken(token, special=True) for token in ("<|endoftext|>", "<|im_start|>", QWEN_END)]
DEEPSEEK_TOKENS = [AddedToken(token, special=token in (BOS, EOS)) for token in NEEDED_TOKENS]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEEPSEEK, AGREEING = "deepseek-v4-1b", "deepseek-v4-1b-agreeing"
DAMPED = ("wo_b.weight", "w2.weight")
"""What layers add to the streams. Where that is little, a token follows from the one before, in draft layers too."""
DAMPING = 1e-3
FP8_SECTION = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FORMATS = ("bf16", *CODES)


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


def visible_tokens(tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """Return which tokens are visible ASCII text, bool [vocab]."""
    texts = (tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size()))
    return np.array([bool(text) and all("!" <= char <= "~" for char in text) for text in texts])


def make_config(shape: dict[str, Any], end: int) -> dict[str, Any]:
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


def quantise(config: dict[str, Any], format: str, group_size: int) -> dict[str, Any]:
    """Return config.json of the format, as `convert` writes it, or Qwen for FP8."""
    if format == "bf16":
        return config
    model = qwen3.parse(config, "config.json")
    if format == "fp8":
        routers = [module for module in DecoderInventory(model).schemes if module.endswith(".mlp.gate")]
        return config | {SECTION: {**FP8_SECTION, "modules_to_not_convert": ["lm_head", *routers]}}
    encoding = {"w8a8": w8a8(), "mxfp4": mxfp4()}.get(format, w4a16(group_size))
    return config | dict(plan_conversion(model, {}, encoding).config)


def make_weights(
    config: dict[str, Any], format: str, visible: NDArray[np.bool_], draw: Callable[..., Tensor] = normal
) -> dict[str, Tensor]:
    """Draw normal weights with variance 1 / fan-in, or codes of such; norms are ones. `visible`: bool [vocab].

    `draw` replaces `normal`.
    """
    inventory = DecoderInventory(qwen3.parse(config, "config.json"))
    tensors: dict[str, Tensor] = {}
    for name, shape in inventory.weights().items():
        module = name.removesuffix(".weight")
        scheme, seen = inventory.schemes.get(module, PLAIN), visible if name in (EMBEDDING, "lm_head.weight") else None
        if len(shape) == 1:
            tensors[name] = ones("BF16", shape)
        elif scheme == PLAIN:
            tensors[name] = draw("BF16", shape, shape[1] ** -0.5, seen)
        else:
            tensors |= quantised(scheme.expected(module, *shape), shape[1], CODES[format], seen)
    return tensors


def make_deepseek_weights(config: dict[str, Any], visible: NDArray[np.bool_], agreeing: bool) -> dict[str, Tensor]:
    """Draw normal weights with variance 1 / fan-in for every tensor; norms and scales are ones.

    If `agreeing`, what layers compute does not matter: each visible token follows another one, whose embedding is its
    output row. So the draft layer predicts all that the model says, but for the first token.
    """
    tensors: dict[str, Tensor] = {}
    model = DeepseekV4Config.from_json(config, "config.json")
    for name, tensor in (model_tensors(model) | draft_tensors(model, range(model.mtp_layers))).items():
        shape, dtype = tensor.shape, "F32" if tensor.role == "float" else "BF16"
        if tensor.role == "ids":
            tensors[name] = chosen(shape, config["n_routed_experts"])
        elif name.endswith(("norm.weight", "_scale")):
            tensors[name] = ones(dtype, shape)
        else:
            spread = shape[1] ** -0.5 if len(shape) > 1 else 0.1
            if agreeing and name.endswith((*DAMPED, "h_proj.weight", "hc_head_fn", "hc_head_base")):
                spread *= DAMPING
            tensors[name] = normal(dtype, shape, spread, visible if name == "head.weight" else None)
    if agreeing:
        tensors["mtp.0.e_proj.weight"] = identity("BF16", model.hidden_size)
        tokens, spread = np.arange(model.vocab_size), model.hidden_size**-0.5
        before = tokens + model.vocab_size
        before[visible] = np.roll(tokens[visible], 1)
        every = np.ones_like(visible)
        tensors["embed.weight"] = keyed("BF16", spread, model.hidden_size, tokens, every)
        tensors["head.weight"] = keyed("BF16", spread, model.hidden_size, before, visible)
    return tensors


def make_folder(out: Path, force: bool) -> None:
    """Make the folder `out`; with `force`, take the weights out of one that is there. Raises BadParameter."""
    if out.exists() and not out.is_dir():
        raise typer.BadParameter(f"{out} is a file; give a folder")
    if out.exists() and any(out.iterdir()) and not force:
        raise typer.BadParameter(f"{out} is not empty; give a folder that is empty or not there yet, or --force")
    out.mkdir(parents=True, exist_ok=True)
    for file in out.glob("*.safetensors*"):
        file.unlink()


def write_settings(out: Path, config: dict[str, Any], end_token: str, deepseek: bool = False) -> None:
    """Write config.json, and those of generation and tokenizer."""
    files = {
        "config.json": config,
        "generation_config.json": {"do_sample": False, "eos_token_id": config["eos_token_id"]},
        "tokenizer_config.json": {"eos_token": end_token} | ({} if deepseek else {"chat_template": CHAT_TEMPLATE}),
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")


def write_qwen(
    out: Path, shape: str, format: str = "bf16", group_size: int = 32, draw: Callable[..., Tensor] = normal
) -> None:
    """Write a checkpoint of Qwen3 in a shape of `SHAPES` to an empty folder. `draw` replaces `normal`."""
    tokenizer = make_tokenizer(SHAPES[shape]["vocab_size"], QWEN_TOKENS)
    tokenizer.save(str(out / "tokenizer.json"))
    config = quantise(make_config(SHAPES[shape], tokenizer.token_to_id(QWEN_END)), format, group_size)
    write_weights(out, make_weights(config, format, visible_tokens(tokenizer), draw))
    write_settings(out, config, QWEN_END)


def write_deepseek(out: Path, agreeing: bool) -> None:
    """Write a checkpoint of DeepSeek V4 to an empty folder."""
    tokenizer = make_tokenizer(DEEPSEEK_V4_1B["vocab_size"], DEEPSEEK_TOKENS)
    tokenizer.save(str(out / "tokenizer.json"))
    write_weights(out, make_deepseek_weights(DEEPSEEK_V4_1B, visible_tokens(tokenizer), agreeing))
    write_settings(out, {**DEEPSEEK_V4_1B, "eos_token_id": tokenizer.token_to_id(EOS)}, EOS, deepseek=True)


def main(
    shape: Annotated[str, typer.Argument(help=f"One of {', '.join((*SHAPES, DEEPSEEK, AGREEING))}.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; created if missing.")],
    format: Annotated[str, typer.Option(help=f"One of {', '.join(FORMATS)}.")] = "bf16",
    group_size: Annotated[int, typer.Option(help="Inputs that share a scale in w4a16.")] = 32,
    force: Annotated[bool, typer.Option("--force", help="Replace a checkpoint that is in the folder.")] = False,
) -> None:
    """Write a checkpoint of random weights."""
    if shape not in (names := (*SHAPES, DEEPSEEK, AGREEING)):
        raise typer.BadParameter(f"{shape} is not one of {', '.join(names)}")
    deepseek = shape in (DEEPSEEK, AGREEING)
    formats = FORMATS[:1] if deepseek else FORMATS
    if format not in formats:
        raise typer.BadParameter(f"{shape} is not made in {format}, but in {', '.join(formats)}")
    make_folder(out, force)
    if deepseek:
        write_deepseek(out, shape == AGREEING)
    else:
        write_qwen(out, shape, format, group_size)


if __name__ == "__main__":
    typer.run(main)
