"""The tensors of a DeepSeek V4 checkpoint by upstream name. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import get_args

from pypto_serving.kernels.constants import GATE_HALF, PANEL
from pypto_serving.model.checkpoint import Expected, StoredTensor
from pypto_serving.model.contents import Shape, StoredBytes, StoredMatrix, as_stored
from pypto_serving.model.deepseek_v4.config import MATRICES, DeepseekV4Config, LayerKind, Role, Tensor, expected_plain
from pypto_serving.model.formats.schemes import Scheme, held, packed_bytes
from pypto_serving.parallel.topology import Split, SplitWeights

_LAYER = re.compile(r"layers\.(\d+)\.")
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
"""How ranks split a matrix; the rest they have whole. Those of experts are split by experts, too.

Projections of attention's input are split as one; that each is by itself gives about the same bytes.
"""
_UNITS = {"gate": 4, "w1": GATE_HALF, "w3": GATE_HALF}
"""Outputs that stay together, where they are not a panel."""


class DeepseekV4Inventory:
    """The tensors of a checkpoint: `model` and `drafts` by upstream name. Implements Inventory.

    `drafts` are the tensors of draft (MTP) layers that are not read. `headers`, if any, decide where config.json
    leaves a choice.
    """

    def __init__(self, config: DeepseekV4Config, headers: Mapping[str, StoredTensor] | None = None) -> None:
        served = range(len(config.drafts))
        self.model = model_tensors(config) | draft_tensors(config, served)
        self.drafts = draft_tensors(config, range(served.stop, config.mtp_layers))
        self._config, self._headers = config, headers or {}
        self._schemes = {role: config.storage.schemes_of(role) for role in get_args(Role)}

    def scheme(self, name: str) -> Scheme:
        """Return how the tensor `name` is stored."""
        tensor = self.model[name] if name in self.model else self.drafts[name]
        schemes = self._schemes[tensor.role]
        if len(schemes) == 1 or not self._headers:
            return schemes[0]
        n, k = tensor.shape
        return held(schemes, self._headers, _module(name), n, k)

    def schemes(self) -> dict[str, Scheme]:
        """Return how each matrix of the model is stored, by module."""
        return {_module(name): self.scheme(name) for name, tensor in self.model.items() if tensor.role in MATRICES}

    def sizes(self) -> dict[str, Shape]:
        """Return [n, k] of every matrix of the model by module."""
        return {_module(name): tensor.shape for name, tensor in self.model.items() if tensor.role in MATRICES}

    def projected(self, kind: LayerKind) -> dict[str, int]:
        """Return the width of each projection of attention's normed input, in layers of a kind that the model has."""
        names = ["wq_a", "wkv"]
        if kind != "swa":
            names += ["compressor.wkv", "compressor.wgate"]
        if kind == "csa":
            names += ["indexer.compressor.wkv", "indexer.compressor.wgate", "indexer.weights_proj"]
        prefix = f"{self._config.prefix(self._config.kinds.index(kind))}attn."
        return {name: self.model[f"{prefix}{name}.weight"].shape[0] for name in names}

    def expected(self, mtp: bool = False) -> dict[str, Expected]:
        """List every required tensor by name, with draft layers if `mtp`."""
        tensors: dict[str, Expected] = {}
        for name, tensor in self._all(mtp).items():
            is_matrix = tensor.role in MATRICES
            tensors |= self._of_matrix(name, tensor) if is_matrix else {name: expected_plain(tensor)}
        return tensors

    def tensors(self) -> dict[str, Shape]:
        """Return the shape of every required tensor by name."""
        return {name: wanted.shape for name, wanted in self.expected().items()}

    def stored(self, dtype: str = "bfloat16", mtp: bool = True) -> dict[str, StoredBytes]:
        """List every tensor as files hold it, in `dtype` unless quantised; with draft layers if `mtp`."""
        return as_stored(self.expected(mtp), dtype)

    def matrices(self) -> Iterator[StoredMatrix]:
        """Yield the matrices of linear layers, without draft layers."""
        for name, tensor in self.model.items():
            if tensor.role in MATRICES:
                tensors = self._of_matrix(name, tensor)
                yield StoredMatrix(self.scheme(name).name, tensor.count, tuple(tensors))

    def num_parameters(self, mtp: bool = False) -> int:
        """Count the elements of all float tensors before quantisation, with draft layers if `mtp`."""
        return sum(tensor.count for tensor in self._all(mtp).values() if tensor.role != "ids")

    def packed_bytes(self, head: Scheme | None = None) -> dict[str, int]:
        """Count the bytes of every tensor as kernels hold it; `head` is how the output layer is held, if not as stored.

        The embedding is bfloat16. Routers, vectors and what is used in float32 outside of matrices are float32.
        """
        sizes = {}
        for name, tensor in self.model.items():
            module = _module(name)
            if name == "embed.weight":
                sizes[name] = 2 * tensor.count
            elif tensor.role in ("float", "ids") or len(tensor.shape) == 1 or name.endswith("ffn.gate.weight"):
                sizes[name] = 4 * tensor.count
            else:
                scheme = head if head and name == "head.weight" else self.scheme(name)
                unit, (n, k) = _UNITS.get(module.rpartition(".")[2], PANEL), tensor.shape
                sizes[name] = packed_bytes(scheme, self._headers, module, n, k, unit)
        return sizes

    def torch_bytes(self, item_bytes: int) -> dict[str, int]:
        """Count the bytes of every tensor in torch."""
        sizes = {"precise": 4, "float": 4, "ids": 8}
        return {name: tensor.count * sizes.get(tensor.role, item_bytes) for name, tensor in self.model.items()}

    def token_share(self, name: str) -> Fraction:
        """Return the part of all tensors called like `name` that a token reads: of experts, the chosen ones."""
        tensor, experts = self.model[name], self._config.experts
        if tensor.role == "expert":
            return Fraction(experts.per_token, experts.count)
        return Fraction(int(tensor.role != "ids" and name != "embed.weight"))

    def split(self, name: str, num_bytes: int) -> SplitWeights:
        """Describe how ranks split the tensor `name` of `num_bytes`."""
        tensor, module = self.model[name], _module(name).rpartition(".")[2]
        return SplitWeights(
            layers=self._stages(name),
            split="experts" if tensor.role == "expert" else _SPLITS.get(module, "whole"),
            outputs=tensor.shape[0],
            unit=_UNITS.get(module, PANEL),
            num_bytes=num_bytes,
        )

    def _stages(self, name: str) -> tuple[int, ...]:
        """Return the layers whose stages hold a tensor; draft layers are in the last one, and need the embedding."""
        if layer := _LAYER.match(name):
            return (int(layer[1]),)
        last = (self._config.num_layers - 1,)
        if name != "embed.weight":
            return last
        return (0, *last) if self._config.drafts else (0,)

    def ignores(self, name: str) -> bool:
        """Return True for tensors of draft layers, where these are not read."""
        return name.startswith("mtp.") and not self._config.drafts

    def _all(self, mtp: bool) -> dict[str, Tensor]:
        return self.model | self.drafts if mtp else self.model

    def _of_matrix(self, name: str, tensor: Tensor) -> dict[str, Expected]:
        n, k = tensor.shape
        return self.scheme(name).expected(_module(name), n, k)


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def model_tensors(model: DeepseekV4Config) -> dict[str, Tensor]:
    """List every tensor of the model by upstream name, without draft layers."""
    vocab, hidden = model.vocab_size, model.hidden_size
    tensors = {"embed.weight": Tensor((vocab, hidden))}
    for layer, kind in enumerate(model.kinds[: model.num_layers]):
        prefix = f"layers.{layer}."
        tensors |= {prefix + name: tensor for name, tensor in _layer_tensors(model, layer, kind).items()}
    tensors |= {"norm.weight": Tensor((hidden,)), "head.weight": Tensor((vocab, hidden))}
    return tensors | _head_mix_tensors(model)


def _head_mix_tensors(model: DeepseekV4Config) -> dict[str, Tensor]:
    streams = model.hyper.streams
    shapes = {"fn": (streams, streams * model.hidden_size), "base": (streams,), "scale": (1,)}
    return {f"hc_head_{name}": Tensor(shape, "float") for name, shape in shapes.items()}


def _layer_tensors(model: DeepseekV4Config, layer: int, kind: LayerKind) -> dict[str, Tensor]:
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
    tensors = {"gate.weight": Tensor((experts.count, hidden), "precise")}
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
    layer = _layer_tensors(model, model.num_layers, "swa") | _head_mix_tensors(model)
    layer |= {f"{name}.weight": Tensor((hidden, hidden), "linear") for name in ("e_proj", "h_proj")}
    layer |= {f"{name}.weight": Tensor((hidden,)) for name in ("enorm", "hnorm", "norm")}
    return {f"mtp.{i}.{name}": tensor for i in layers for name, tensor in layer.items()}
