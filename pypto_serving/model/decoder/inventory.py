"""The tensors of a decoder's checkpoint. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import ClassVar

from pypto_serving.kernels.constants import GATE_HALF
from pypto_serving.model.checkpoint import StoredTensor
from pypto_serving.model.decoder.recipe import MLP, DecoderConfig, MlpRecipe
from pypto_serving.model.formats.schemes import PLAIN, Fp8, Int8, Plain, Scheme
from pypto_serving.model.inventory import Inventory, Role, Shape, Tensor
from pypto_serving.parallel.topology import Split

_IGNORED = re.compile(r".*\.(rotary_emb\.inv_freq|self_attn\.([kv]_proj\.)?([qkv]|output)_scale)")
"""Tensors that nothing reads: frequencies, and scales of a KV cache in FP8."""
EMBEDDING = "model.embed_tokens.weight"


class DecoderInventory(Inventory):
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
        "w1": "columns",
        "w3": "columns",
        "w2": "columns",
        "embed_tokens": "columns",
        "lm_head": "columns",
    }
    units: ClassVar[Mapping[str, int]] = dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), GATE_HALF)
    endings = (".weight", ".bias")

    def __init__(self, config: DecoderConfig, headers: Mapping[str, StoredTensor] | None = None) -> None:
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
            yield tuple(prefix + name for name in MLP[:2])

    def weights(self) -> dict[str, Shape]:
        """Return the shape of every weight, before quantization, by name."""
        return {name: tensor.shape for name, tensor in self.model.items()}

    def ignores(self, name: str) -> bool:
        """Return True for tensors in some checkpoints that nothing reads."""
        module, _, last = name.rpartition(".")
        extra = last in self.schemes.get(module, PLAIN).extras
        return extra or bool(_IGNORED.fullmatch(name)) or (self.config.tied_embeddings and name == "lm_head.weight")


def _tensors(model: DecoderConfig) -> dict[str, Tensor]:
    hidden = model.hidden_size
    tensors = {EMBEDDING: Tensor((model.vocab_size, hidden))}
    for layer in range(model.num_layers):
        prefix = f"model.layers.{layer}."
        tensors |= {prefix + name: tensor for name, tensor in _layer_tensors(model, layer).items()}
    tensors["model.norm.weight"] = Tensor((hidden,))
    if not model.tied_embeddings:
        tensors["lm_head.weight"] = Tensor((model.vocab_size, hidden), "linear")
    return tensors


def _layer_tensors(model: DecoderConfig, layer: int) -> dict[str, Tensor]:
    hidden, names = model.hidden_size, model.names
    attention, mlp = model.layers[layer].attention, model.layers[layer].mlp
    queries, keys = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    tensors = {f"{name}.weight": Tensor((hidden,)) for name in ("input_layernorm", "post_attention_layernorm")}
    if attention.head_norms:
        tensors |= {f"self_attn.{name}.weight": Tensor((attention.head_dim,)) for name in ("q_norm", "k_norm")}
    for name, size in {"q_proj": queries, "k_proj": keys, "v_proj": keys}.items():
        tensors |= _linear(f"self_attn.{name}", size, hidden, attention.qkv_bias)
    tensors |= _linear("self_attn.o_proj", hidden, queries, attention.o_bias)
    if isinstance(mlp, MlpRecipe):
        return tensors | _mlp_tensors(MLP, hidden, mlp.width, "linear", mlp.bias)
    tensors |= _linear(names.router, mlp.count, hidden, False)
    for expert in range(mlp.count):
        tensors |= _mlp_tensors(names.expert(expert), hidden, mlp.width, "expert", False)
    return tensors


def _mlp_tensors(modules: tuple[str, str, str], hidden: int, width: int, role: Role, bias: bool) -> dict[str, Tensor]:
    gate, up, down = modules
    return (
        _linear(gate, width, hidden, bias, role)
        | _linear(up, width, hidden, bias, role)
        | _linear(down, hidden, width, bias, role)
    )


def _linear(module: str, n: int, k: int, bias: bool, role: Role = "linear") -> dict[str, Tensor]:
    weight = {f"{module}.weight": Tensor((n, k), role)}
    return weight | {f"{module}.bias": Tensor((n,))} if bias else weight
