"""The tensors of a Qwen3 or Qwen3-MoE checkpoint. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import ClassVar

from pypto_serving.kernels.constants import GATE_HALF
from pypto_serving.model.checkpoint import StoredTensor
from pypto_serving.model.formats.schemes import PLAIN, Fp8, Int8, Plain, Scheme
from pypto_serving.model.inventory import Inventory, Role, Shape, Tensor
from pypto_serving.model.qwen3.config import Qwen3Config
from pypto_serving.parallel.topology import Split

_IGNORED = re.compile(r".*\.(rotary_emb\.inv_freq|self_attn\.([kv]_proj\.)?([qkv]|output)_scale)")
"""Tensors that nothing reads: frequencies, and scales of a KV cache in FP8."""
EMBEDDING = "model.embed_tokens.weight"


class Qwen3Inventory(Inventory):
    """The tensors of a checkpoint with this config. There are no draft layers."""

    layer = re.compile(r"model\.layers\.(\d+)\.")
    embedding = EMBEDDING
    splits: ClassVar[Mapping[str, Split]] = {
        "q_proj": "heads",
        "k_proj": "kv_heads",
        "v_proj": "kv_heads",
        "o_proj": "attention",
        "gate_proj": "columns",
        "up_proj": "columns",
        "down_proj": "columns",
        "embed_tokens": "columns",
        "lm_head": "columns",
    }
    units: ClassVar[Mapping[str, int]] = {"gate_proj": GATE_HALF, "up_proj": GATE_HALF}
    endings = (".weight", ".bias")

    def __init__(self, config: Qwen3Config, headers: Mapping[str, StoredTensor] | None = None) -> None:
        def ways(module: str, _: Role) -> tuple[Scheme, ...]:
            return (PLAIN,) if config.quantization is None else config.quantization.schemes(module)

        tied = config.tied_embeddings
        super().__init__(config, _tensors(config), ways, headers, head=config.head, tied=tied, embeds_last=tied)

    def quantization(self) -> str:
        """Name the schemes of quantised matrices; empty if there are none."""
        return " + ".join(dict.fromkeys(scheme.name for scheme in self.schemes.values() if scheme.name))

    def int8_weights(self) -> frozenset[str]:
        """Return the names of the int8 weights."""
        return frozenset(f"{module}.weight" for module, scheme in self.schemes.items() if isinstance(scheme, Int8))

    def inputs_of_codes(self) -> set[int]:
        """Return the numbers of inputs that matrices of 4-bit codes have."""
        sizes = self.sizes()
        coded = (module for module, scheme in self.schemes.items() if not isinstance(scheme, Plain | Int8 | Fp8))
        return {sizes[module][1] for module in coded}

    def joined(self) -> Iterator[tuple[str, ...]]:
        """Yield modules of dense layers whose matrices have the same inputs, and may become one."""
        for layer in range(self.config.num_layers):
            prefix = f"model.layers.{layer}."
            yield tuple(f"{prefix}self_attn.{name}_proj" for name in "qkv")
            yield f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj"

    def weights(self) -> dict[str, Shape]:
        """Return the shape of every weight, before quantization, by name."""
        return {name: tensor.shape for name, tensor in self.model.items()}

    def ignores(self, name: str) -> bool:
        """Return True for tensors in some checkpoints that nothing reads."""
        module, _, last = name.rpartition(".")
        extra = last in self.schemes.get(module, PLAIN).extras
        return extra or bool(_IGNORED.fullmatch(name)) or (self.config.tied_embeddings and name == "lm_head.weight")


def _tensors(model: Qwen3Config) -> dict[str, Tensor]:
    hidden = model.hidden_size
    tensors = {EMBEDDING: Tensor((model.vocab_size, hidden))}
    for layer in range(model.num_layers):
        prefix = f"model.layers.{layer}."
        tensors |= {prefix + name: tensor for name, tensor in _layer_tensors(model, layer).items()}
    tensors["model.norm.weight"] = Tensor((hidden,))
    if not model.tied_embeddings:
        tensors["lm_head.weight"] = Tensor((model.vocab_size, hidden), "linear")
    return tensors


def _layer_tensors(model: Qwen3Config, layer: int) -> dict[str, Tensor]:
    hidden, experts = model.hidden_size, model.experts
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": hidden}
    tensors = {f"{name}.weight": Tensor((hidden,)) for name in ("input_layernorm", "post_attention_layernorm")}
    tensors |= {f"self_attn.{name}.weight": Tensor((model.head_dim,)) for name in ("q_norm", "k_norm")}
    for name, size in rows.items():
        tensors[f"self_attn.{name}.weight"] = Tensor((size, queries if name == "o_proj" else hidden), "linear")
        if model.attention_bias:
            tensors[f"self_attn.{name}.bias"] = Tensor((size,))
    if experts is None or layer not in experts.layers:
        return tensors | _mlp_tensors("mlp.", hidden, model.intermediate_size, "linear")
    tensors["mlp.gate.weight"] = Tensor((experts.count, hidden), "linear")
    for expert in range(experts.count):
        tensors |= _mlp_tensors(f"mlp.experts.{expert}.", hidden, experts.intermediate_size, "expert")
    return tensors


def _mlp_tensors(prefix: str, hidden: int, intermediate: int, role: Role) -> dict[str, Tensor]:
    return {
        f"{prefix}gate_proj.weight": Tensor((intermediate, hidden), role),
        f"{prefix}up_proj.weight": Tensor((intermediate, hidden), role),
        f"{prefix}down_proj.weight": Tensor((hidden, intermediate), role),
    }
