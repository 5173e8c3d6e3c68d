"""The tensors of a DeepSeek V4 checkpoint by upstream name. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from pypto_serving.kernels.constants import GATE_HALF
from pypto_serving.model.checkpoint import StoredTensor
from pypto_serving.model.deepseek_v4.config import DeepseekV4Config, LayerKind
from pypto_serving.model.inventory import MATRICES, Inventory, Role, Tensor
from pypto_serving.parallel.topology import Split

_SPLITS: Mapping[str, Split] = {
    "wq_a": "attention",
    "wq_b": "heads",
    "wkv": "attention",
    "wgate": "attention",
    "weights_proj": "attention",
    "wo_a": "attention",
    "wo_b": "attention",
    "gate": "columns",
    "w1": "columns",
    "w2": "columns",
    "w3": "columns",
    "e_proj": "columns",
    "h_proj": "columns",
    "embed": "columns",
    "head": "columns",
}
"""How ranks split matrices; they hold all others whole. Matrices of experts are also split by experts.

Projections of attention's input are split together; counting each separately gives about the same bytes.
"""


class DeepseekV4Inventory(Inventory):
    """The tensors of a DeepSeek V4 checkpoint, by upstream name."""

    layer = re.compile(r"layers\.(\d+)\.")
    embedding = "embed.weight"
    splits = _SPLITS
    units: ClassVar[Mapping[str, int]] = {"gate": 4, "w1": GATE_HALF, "w3": GATE_HALF}

    def __init__(self, config: DeepseekV4Config, headers: Mapping[str, StoredTensor] | None = None) -> None:
        served, by_role = range(len(config.drafts)), {role: config.storage.schemes_of(role) for role in MATRICES}
        super().__init__(
            config,
            model_tensors(config) | draft_tensors(config, served),
            lambda _, role: by_role[role],
            headers,
            drafts=draft_tensors(config, range(served.stop, config.mtp_layers)),
            head="head",
            embeds_last=bool(config.drafts),
        )

    def projected(self, kind: LayerKind) -> dict[str, int]:
        """Return the width of each projection of attention's normed input, in layers of `kind`."""
        names = ["wq_a", "wkv"]
        if kind != "swa":
            names += ["compressor.wkv", "compressor.wgate"]
        if kind == "csa":
            names += ["indexer.compressor.wkv", "indexer.compressor.wgate", "indexer.weights_proj"]
        prefix = f"{self.config.prefix(self.config.kinds.index(kind))}attn."
        return {name: self.model[f"{prefix}{name}.weight"].shape[0] for name in names}

    def ignores(self, name: str) -> bool:
        """Return whether a tensor belongs to draft layers that are not read, or to nothing else that is."""
        return not self.config.drafts if name.startswith("mtp.") else super().ignores(name)


def model_tensors(model: DeepseekV4Config) -> dict[str, Tensor]:
    """List every tensor of the model by upstream name, without draft layers."""
    vocab, hidden = model.vocab_size, model.hidden_size
    tensors = {"embed.weight": Tensor((vocab, hidden))}
    for layer, kind in enumerate(model.kinds[: model.num_layers]):
        prefix = f"layers.{layer}."
        tensors |= {prefix + name: tensor for name, tensor in layer_tensors(model, layer, kind).items()}
    tensors |= {"norm.weight": Tensor((hidden,)), "head.weight": Tensor((vocab, hidden))}
    return tensors | head_mix_tensors(model)


def head_mix_tensors(model: DeepseekV4Config) -> dict[str, Tensor]:
    """List the tensors that join the streams before the output layer."""
    streams = model.hyper.streams
    shapes = {"fn": (streams, streams * model.hidden_size), "base": (streams,), "scale": (1,)}
    return {f"hc_head_{name}": Tensor(shape, "float") for name, shape in shapes.items()}


def layer_tensors(model: DeepseekV4Config, layer: int, kind: LayerKind) -> dict[str, Tensor]:
    """List the tensors of a layer by upstream name, without its prefix."""
    hidden, streams = model.hidden_size, model.hyper.streams
    tensors = {f"{part}_norm.weight": Tensor((hidden,)) for part in ("attn", "ffn")}
    for part in ("attn", "ffn"):
        tensors[f"hc_{part}_fn"] = Tensor((model.hyper.mixes, streams * hidden), "float")
        tensors[f"hc_{part}_base"] = Tensor((model.hyper.mixes,), "float")
        tensors[f"hc_{part}_scale"] = Tensor((3,), "float")
    tensors |= {f"attn.{name}": tensor for name, tensor in _attention_tensors(model, kind).items()}
    return tensors | {f"ffn.{name}": tensor for name, tensor in _expert_tensors(model, layer).items()}


def _attention_tensors(model: DeepseekV4Config, kind: LayerKind) -> dict[str, Tensor]:
    hidden, heads, rank, groups = model.hidden_size, model.num_heads * model.head_dim, model.q_lora_rank, model.o_groups
    tensors = {
        "wq_a.weight": Tensor((rank, hidden), "latent"),
        "q_norm.weight": Tensor((rank,)),
        "wq_b.weight": Tensor((heads, rank), "linear"),
        "wkv.weight": Tensor((model.head_dim, hidden), "latent"),
        "kv_norm.weight": Tensor((model.head_dim,)),
        "wo_a.weight": Tensor((groups * model.o_lora_rank, heads // groups), "latent"),
        "wo_b.weight": Tensor((hidden, groups * model.o_lora_rank), "linear"),
        "attn_sink": Tensor((model.num_heads,), "float"),
    }
    if kind != "swa":
        tensors |= _compressor_tensors(model, "compressor.", kind, model.head_dim)
    if kind == "csa":
        assert model.indexer is not None
        dim, count = model.indexer.head_dim, model.indexer.num_heads
        tensors["indexer.wq_b.weight"] = Tensor((count * dim, rank), "linear")
        tensors["indexer.weights_proj.weight"] = Tensor((count, hidden), "precise")
        tensors |= _compressor_tensors(model, "indexer.compressor.", kind, dim)
    return tensors


def _compressor_tensors(model: DeepseekV4Config, prefix: str, kind: LayerKind, dim: int) -> dict[str, Tensor]:
    width = model.compressed_width(kind, dim)
    return {
        f"{prefix}wkv.weight": Tensor((width, model.hidden_size), "precise"),
        f"{prefix}wgate.weight": Tensor((width, model.hidden_size), "precise"),
        f"{prefix}ape": Tensor((model.ratio(kind), width), "float"),
        f"{prefix}norm.weight": Tensor((dim,)),
    }


def _expert_tensors(model: DeepseekV4Config, layer: int) -> dict[str, Tensor]:
    experts, hidden = model.experts, model.hidden_size
    tensors = {"gate.weight": Tensor((experts.count, hidden), "router")}
    if layer in experts.hash_layers:
        tensors["gate.tid2eid"] = Tensor((model.vocab_size, experts.per_token), "ids")
    else:
        tensors["gate.bias"] = Tensor((experts.count,), "float")
    members: list[tuple[str, Role]] = [(f"experts.{e}", "expert") for e in range(experts.count)]
    for name, role in [*members, ("shared_experts", "linear")]:
        tensors[f"{name}.w1.weight"] = Tensor((experts.intermediate_size, hidden), role)
        tensors[f"{name}.w2.weight"] = Tensor((hidden, experts.intermediate_size), role)
        tensors[f"{name}.w3.weight"] = Tensor((experts.intermediate_size, hidden), role)
    return tensors


def draft_tensors(model: DeepseekV4Config, layers: range) -> dict[str, Tensor]:
    """List the tensors of some draft layers by upstream name.

    A draft layer is an SWA layer routed by score, with projections that join stream and token, and its own head mix.
    """
    hidden = model.hidden_size
    layer = layer_tensors(model, model.num_layers, "swa") | head_mix_tensors(model)
    layer |= {f"{name}.weight": Tensor((hidden, hidden), "linear") for name in ("e_proj", "h_proj")}
    layer |= {f"{name}.weight": Tensor((hidden,)) for name in ("enorm", "hnorm", "norm")}
    return {f"mtp.{i}.{name}": tensor for i in layers for name, tensor in layer.items()}
