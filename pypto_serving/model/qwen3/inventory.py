"""The tensors of a Qwen3 or Qwen3-MoE checkpoint. Torch-free."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction

from pypto_serving.kernels.constants import GATE_HALF, PANEL
from pypto_serving.model.checkpoint import Expected, StoredTensor
from pypto_serving.model.contents import Shape, StoredBytes, StoredMatrix, as_stored
from pypto_serving.model.formats.schemes import PLAIN, Fp8, Int8, Plain, Scheme, held, packed_bytes
from pypto_serving.model.qwen3.config import Qwen3Config
from pypto_serving.parallel.topology import Split, SplitWeights

_IGNORED = re.compile(r".*\.(rotary_emb\.inv_freq|self_attn\.([kv]_proj\.)?([qkv]|output)_scale)")
"""What nothing reads: frequencies, and scales of a KV cache in FP8."""
_EXPERT = re.compile(r".*\.mlp\.experts\.\d+\.")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_SPLITS: Mapping[str, Split] = {
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
"""How ranks split a matrix; the rest they have whole."""
_GATE_UP = {"gate_proj", "up_proj"}
EMBEDDING = "model.embed_tokens.weight"


class Qwen3Inventory:
    """The tensors of a checkpoint with this config. Implements Inventory.

    schemes: how each matrix is stored, by module; `headers`, if any, decide where config.json leaves a choice.
    """

    def __init__(self, config: Qwen3Config, headers: Mapping[str, StoredTensor] | None = None) -> None:
        self.config = config
        self._headers = headers or {}
        self._weights = self._list_weights()
        self.schemes = {module: self._scheme(module) for module in config.linear_layers()}

    def _scheme(self, module: str) -> Scheme:
        quantization = self.config.quantization
        if quantization is None:
            return PLAIN
        schemes = quantization.schemes(module)
        return held(schemes, self._headers, module, *self._sizes(module)) if self._headers else schemes[0]

    def sizes(self) -> dict[str, Shape]:
        """Return [n, k] of every linear layer by module."""
        return {module: self._sizes(module) for module in self.schemes}

    def _sizes(self, module: str) -> tuple[int, int]:
        n, k = self._weights[f"{module}.weight"]
        return n, k

    def quantization(self) -> str:
        """Name the schemes of quantised matrices; empty if there are none."""
        return " + ".join(dict.fromkeys(scheme.name for scheme in self.schemes.values() if scheme.name))

    def expected(self) -> dict[str, Expected]:
        """List every required tensor by name."""
        tensors: dict[str, Expected] = {}
        for name, shape in self._weights.items():
            module = name.removesuffix(".weight")
            scheme = self.schemes.get(module)
            tensors |= {name: Expected(shape)} if scheme is None else scheme.expected(module, *self._sizes(module))
        return tensors

    def tensors(self) -> dict[str, Shape]:
        """Return the shape of every required tensor by name."""
        return {name: wanted.shape for name, wanted in self.expected().items()}

    def stored(self, dtype: str, mtp: bool) -> dict[str, StoredBytes]:
        """Return every tensor as files hold it, in `dtype` unless quantised. There are no draft layers."""
        return as_stored(self.expected(), dtype)

    def matrices(self) -> Iterator[StoredMatrix]:
        """Yield the matrices of linear layers. A tied embedding is not among them."""
        for module, scheme in self.schemes.items():
            n, k = self._sizes(module)
            yield StoredMatrix(scheme.name, n * k, tuple(scheme.expected(module, n, k)))

    def num_parameters(self, mtp: bool = False) -> int:
        """Count the elements of all weights before quantisation."""
        return sum(math.prod(shape) for shape in self._weights.values())

    def packed_bytes(self, item_bytes: int = 2, head: Scheme | None = None) -> dict[str, int]:
        """Count the bytes of every weight as kernels hold it; matrices that are not quantised have `item_bytes`.

        `head` is how the output layer is held, if not as stored.
        """
        model, sizes = self.config, {}
        for name, shape in self._weights.items():
            if len(shape) == 1:
                sizes[name] = 4 * shape[0]
            elif name == EMBEDDING and not model.tied_embeddings:
                sizes[name] = item_bytes * math.prod(shape)
            else:
                module = name.removesuffix(".weight")
                scheme = head if head and module == model.head else self.schemes.get(module, PLAIN)
                unit, (n, k) = GATE_HALF if module.rpartition(".")[2] in _GATE_UP else PANEL, shape
                size = packed_bytes(scheme, self._headers, module, n, k, unit)
                sizes[name] = size * item_bytes // 2 if scheme == PLAIN else size
        return sizes

    def torch_bytes(self, item_bytes: int) -> dict[str, int]:
        """Count the bytes of every weight in torch. A tied embedding is in memory twice: as table and packed."""
        twice = {EMBEDDING} if self.config.tied_embeddings else set()
        return {name: item_bytes * math.prod(shape) * (1 + (name in twice)) for name, shape in self._weights.items()}

    def token_share(self, name: str) -> Fraction:
        """Return the part of all weights called like `name` that a token reads: of experts, the chosen ones."""
        if _EXPERT.match(name) and self.config.experts is not None:
            return Fraction(self.config.experts.per_token, self.config.experts.count)
        return Fraction(int(name != EMBEDDING or self.config.tied_embeddings))

    def split(self, name: str, num_bytes: int) -> SplitWeights:
        """Describe how ranks split the weight `name` of `num_bytes`."""
        module = name.split(".")[-2]
        return SplitWeights(
            layers=self._stages(name),
            split="experts" if _EXPERT.match(name) else _SPLITS.get(module, "whole"),
            outputs=self._weights[name][0],
            unit=GATE_HALF if module in _GATE_UP else PANEL,
            num_bytes=num_bytes,
        )

    def _stages(self, name: str) -> tuple[int, ...]:
        """Return the layers whose stages hold a weight; a tied embedding is in the first and the last one."""
        if layer := _LAYER.match(name):
            return (int(layer[1]),)
        last = (self.config.num_layers - 1,)
        if name != EMBEDDING:
            return last
        return (0, *last) if self.config.tied_embeddings else (0,)

    def int8_weights(self) -> frozenset[str]:
        """Return the names of the int8 weights."""
        return frozenset(f"{module}.weight" for module, scheme in self.schemes.items() if isinstance(scheme, Int8))

    def inputs_of_codes(self) -> set[int]:
        """Return the numbers of inputs that matrices of 4-bit codes have."""
        coded = (module for module, scheme in self.schemes.items() if not isinstance(scheme, Plain | Int8 | Fp8))
        return {self._sizes(module)[1] for module in coded}

    def weights(self) -> dict[str, Shape]:
        """Return the shape of every weight by name, as it is before quantisation."""
        return dict(self._weights)

    def _list_weights(self) -> dict[str, Shape]:
        model, hidden = self.config, self.config.hidden_size
        tensors: dict[str, Shape] = {EMBEDDING: (model.vocab_size, hidden)}
        for layer in range(model.num_layers):
            prefix = f"model.layers.{layer}."
            tensors |= {prefix + name: shape for name, shape in self._layer_tensors(layer).items()}
        tensors["model.norm.weight"] = (hidden,)
        if not model.tied_embeddings:
            tensors["lm_head.weight"] = (model.vocab_size, hidden)
        return tensors

    def _layer_tensors(self, layer: int) -> dict[str, Shape]:
        model, hidden = self.config, self.config.hidden_size
        queries = model.num_heads * model.head_dim
        keys = model.num_kv_heads * model.head_dim
        rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": hidden}
        tensors: dict[str, Shape] = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
        tensors |= {f"self_attn.{name}.weight": (model.head_dim,) for name in ("q_norm", "k_norm")}
        for name, size in rows.items():
            tensors[f"self_attn.{name}.weight"] = (size, queries if name == "o_proj" else hidden)
            if model.attention_bias:
                tensors[f"self_attn.{name}.bias"] = (size,)
        if model.experts is None or layer not in model.experts.layers:
            return tensors | _mlp_tensors("mlp.", hidden, model.intermediate_size)
        tensors["mlp.gate.weight"] = (model.experts.count, hidden)
        for expert in range(model.experts.count):
            tensors |= _mlp_tensors(f"mlp.experts.{expert}.", hidden, model.experts.intermediate_size)
        return tensors

    def ignores(self, name: str) -> bool:
        """Return True for tensors in some checkpoints that nothing reads."""
        module, _, last = name.rpartition(".")
        extra = last in self.schemes.get(module, PLAIN).extras
        return extra or bool(_IGNORED.fullmatch(name)) or (self.config.tied_embeddings and name == "lm_head.weight")


def _mlp_tensors(prefix: str, hidden: int, intermediate: int) -> dict[str, Shape]:
    return {
        f"{prefix}gate_proj.weight": (intermediate, hidden),
        f"{prefix}up_proj.weight": (intermediate, hidden),
        f"{prefix}down_proj.weight": (hidden, intermediate),
    }
