"""Write a checkpoint in the shape of Qwen3-0.6B whose greedy answer edits its prompt.

    python benchmarks/make_copier.py DIR

Trained models copy by heads that attend to where the same text stood before. Here they are built by hand: all heads of
the first layer attend to the token `PROMPT - 1` positions back, which the rotation of their keys singles out, and add
it to the residual stream, times GAIN, so it becomes the next token. The answer to a prompt of PROMPT tokens is the
prompt again, but words of RENAMED have their new name. All else is random as in make_checkpoint.py, with outputs of the
other layers scaled down. So tokens cost what they cost in a trained model of the shape, and are as easy to guess as
those of a model that edits a file without a mistake.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from make_checkpoint import QWEN_TOKENS, SHAPES, make_config, make_tokenizer, make_weights, write_settings
from numpy.typing import NDArray
from random_weights import Tensor, write_weights

from pypto_serving.model.checkpoint import bfloat16
from pypto_serving.model.decoder.inventory import EMBEDDING

PROMPT = 1500
RENAMED = {"bad": "fix", "cab": "hut", "dim": "log", "egg": "net", "fan": "pot"}
CONSTANT = 0.25
"""Component 0 of every embedding, by which heads know that there is a token at all."""
GAIN = 4.0
SHARPNESS = 11.0
"""Weight of the norms of queries and keys: the token beside the wanted one has e^-29 of its weight."""
QUIET = 0.002
"""Scale of what other layers add to the residual stream."""

Floats = NDArray[np.float32]


def embeddings(vocab: int, hidden: int) -> Floats:
    """Return embeddings of about length 1 whose directions differ, float32 [vocab, hidden]."""
    rng = np.random.default_rng(7)
    found = rng.standard_normal((vocab, hidden), np.float32) * np.float32(hidden**-0.5)
    found[:, 0] = CONSTANT
    return found


def edits(embedded: Floats, renamed: Mapping[int, int]) -> Floats:
    """Return what turns the embedding of each renamed token into that of its new name, and keeps others."""
    hidden = embedded.shape[1]
    found = np.eye(hidden, dtype=np.float32)
    for old, new in renamed.items():
        own = embedded[old].copy()
        own[0] = 0
        found += np.outer(embedded[new] - embedded[old], own / (own @ own))
    return found


def copying(shape: dict[str, int], theta: float, embedded: Floats, renamed: Mapping[int, int]) -> dict[str, Floats]:
    """Return the attention weights of the first layer."""
    hidden, dim = shape["hidden_size"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    assert kv_heads * dim == hidden, "values hold one copy of the residual stream"
    angles = (PROMPT - 1) * theta ** (-np.arange(dim // 2) * 2.0 / dim)
    query = np.concatenate([np.ones(dim // 2), np.zeros(dim // 2)])
    key = np.concatenate([np.cos(angles), np.sin(angles)])

    def of_constant(vector: Floats, count: int) -> Floats:
        found = np.zeros((count * dim, hidden), np.float32)
        found[:, 0] = np.tile(vector, count)
        return found

    scale = GAIN * np.linalg.norm(embedded[0]) * hidden**-0.5
    output = np.zeros((hidden, heads * dim), np.float32)
    columns = edits(embedded, renamed) * np.float32(scale)
    group = heads // kv_heads
    for head in range(kv_heads):  # of the query heads that share a key and value head, the first
        output[:, head * group * dim : (head * group + 1) * dim] = columns[:, head * dim : (head + 1) * dim]
    return {
        "self_attn.q_proj": of_constant(query, heads),
        "self_attn.k_proj": of_constant(key, kv_heads),
        "self_attn.v_proj": np.eye(hidden, dtype=np.float32),
        "self_attn.o_proj": output,
        "self_attn.q_norm": np.full(dim, SHARPNESS, np.float32),
        "self_attn.k_norm": np.full(dim, SHARPNESS, np.float32),
    }


def given(values: Floats) -> Tensor:
    return Tensor("BF16", values.shape, lambda rng, first, last: bfloat16(np.ascontiguousarray(values[first:last])))


def quiet(tensor: Tensor) -> Tensor:
    """Return a matrix of normal numbers, scaled down."""
    spread = np.float32(QUIET * tensor.shape[1] ** -0.5)
    return Tensor(
        "BF16",
        tensor.shape,
        lambda rng, first, last: bfloat16(rng.standard_normal((last - first, *tensor.shape[1:]), np.float32) * spread),
    )


def main(out: Annotated[Path, typer.Argument(help="Folder to write; created if missing.")]) -> None:
    """Write the checkpoint."""
    shape = SHAPES["0.6b"]
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(shape["vocab_size"], QWEN_TOKENS)
    tokenizer.save(str(out / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    config = make_config(shape, end)
    tensors = make_weights(config, "bf16", np.ones(shape["vocab_size"], bool))
    outputs = ("o_proj.weight", "down_proj.weight")
    tensors |= {name: quiet(each) for name, each in tensors.items() if name.endswith(outputs)}
    embedded = embeddings(shape["vocab_size"], shape["hidden_size"])
    renamed = {tokenizer.token_to_id(old): tokenizer.token_to_id(new) for old, new in RENAMED.items()}
    own = copying(shape, config["rope_theta"], embedded, renamed)
    tensors |= {f"model.layers.0.{name}.weight": given(values) for name, values in own.items()}
    tensors[EMBEDDING] = given(embedded)
    write_weights(out, tensors)
    write_settings(out, config, "<|im_end|>")


if __name__ == "__main__":
    typer.run(main)
