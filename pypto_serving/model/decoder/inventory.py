"""The tensors of a decoder's checkpoint. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from msgspec.structs import replace

from pypto_serving.kernels.constants import GATE_HALF
from pypto_serving.model.checkpoint import StoredTensor
from pypto_serving.model.decoder.recipe import DecoderConfig, MlpRecipe
from pypto_serving.model.formats.schemes import PLAIN, Fp8, Int8, Plain, Scheme
from pypto_serving.model.inventory import Inventory, Role, Shape, Tensor
from pypto_serving.parallel.topology import Split, SplitWeights

_IGNORED = re.compile(
    r".*\.(rotary_emb\.\w+|self_attn\.(masked_bias|bias)|self_attn\.(attn\.|[kv]_proj\.)?([qkv]|kv|output|prob)_scale)"
)
"""Tensors that nothing reads: frequencies, masks, and scales of a KV cache in FP8."""
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
        "embed_tokens": "columns",
        "lm_head": "columns",
    }
    units: ClassVar[Mapping[str, int]] = dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj"), GATE_HALF)
    endings = (".weight", ".bias")

    def __init__(self, config: DecoderConfig, headers: Mapping[str, StoredTensor] | None = None) -> None:
        def ways(module: str, _: Role) -> tuple[Scheme, ...]:
            return (PLAIN,) if config.quantization is None else config.quantization.schemes(module)

        tied = config.tied_embeddings
        super().__init__(config, _tensors(config), ways, headers, head=config.head, tied=tied, embeds_last=tied)

    def split(self, name: str, num_bytes: int) -> list[SplitWeights]:
        """Describe how ranks split the tensor `name`; one that holds several matrices is split as these are."""
        [whole] = super().split(name, num_bytes)
        if self._part(name) == "gate_up_proj":
            return [replace(whole, split="columns", outputs=whole.outputs // 2)]
        if self._part(name) != "qkv_proj":
            return [whole]
        heads, kv_heads = self.config.num_heads, 2 * self.config.num_kv_heads
        keys = num_bytes * kv_heads // (heads + kv_heads)
        return [
            replace(whole, split="heads", outputs=0, num_bytes=num_bytes - keys),
            replace(whole, split="kv_heads", outputs=0, num_bytes=keys),
        ]

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
        return {sizes[module][1] for module in coded} | {self.model[name].shape[1] for name in self.blocks}

    def joined(self) -> Iterator[tuple[str, ...]]:
        """Yield modules of dense layers whose matrices have the same inputs, and may become one."""
        for layer in range(self.config.num_layers):
            for modules in (self.config.names.qkv, self.config.names.gate_up):
                yield tuple(f"model.layers.{layer}.{module}" for module in modules)

    def weights(self) -> dict[str, Shape]:
        """Return the shape of every weight, before quantization, by name."""
        return {name: tensor.shape for name, tensor in self.model.items()}

    def ignores(self, name: str) -> bool:
        """Return True for tensors in some checkpoints that nothing reads."""
        module, _, last = name.rpartition(".")
        extra = last in self.schemes.get(module, PLAIN).extras or bool(_IGNORED.fullmatch(name))
        return extra or (self.config.tied_embeddings and name == "lm_head.weight") or super().ignores(name)


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
    tensors |= _joined(names.qkv, (queries, keys, keys), hidden, attention.qkv_bias)
    tensors |= _linear("self_attn.o_proj", hidden, queries, attention.o_bias)
    if isinstance(mlp, MlpRecipe):
        tensors |= _joined(names.gate_up, (mlp.width, mlp.width), hidden, mlp.bias)
        return tensors | _linear(names.down, hidden, mlp.width, mlp.bias)
    tensors |= _linear(names.router, mlp.count, hidden, False)
    for expert in range(mlp.count):
        gate, up, down = names.expert(expert)
        tensors |= {f"{module}.weight": Tensor((mlp.width, hidden), "expert") for module in (gate, up)}
        tensors[f"{down}.weight"] = Tensor((hidden, mlp.width), "expert")
    return tensors


def _joined(modules: Sequence[str], sizes: Sequence[int], k: int, bias: bool) -> dict[str, Tensor]:
    """Return matrices of `sizes` outputs, or the only one that holds them all."""
    held = sizes if len(modules) == len(sizes) else [sum(sizes)]
    return {
        name: each
        for module, n in zip(modules, held, strict=True)
        for name, each in _linear(module, n, k, bias).items()
    }


def _linear(module: str, n: int, k: int, bias: bool) -> dict[str, Tensor]:
    weight = {f"{module}.weight": Tensor((n, k), "linear")}
    return weight | {f"{module}.bias": Tensor((n,))} if bias else weight
