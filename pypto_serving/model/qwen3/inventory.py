"""The tensors of a Qwen3 or Qwen3-MoE checkpoint. Torch-free."""

from __future__ import annotations

import math
import re

from pypto_serving.model.checkpoint import INT8
from pypto_serving.model.contents import STORED_DTYPES, Shape, Stored
from pypto_serving.model.quantization import scale_name
from pypto_serving.model.qwen3.config import Qwen3Config

_IGNORED = re.compile(r".*\.rotary_emb\.inv_freq")


class Qwen3Inventory:
    """The tensors of a checkpoint with this config. Implements Inventory."""

    def __init__(self, config: Qwen3Config) -> None:
        self.config = config

    def tensors(self) -> dict[str, Shape]:
        """Return the shape of every required tensor by name."""
        weights, int8 = self.weights(), self.int8_weights()
        return weights | {scale_name(name): (shape[0], 1) for name, shape in weights.items() if name in int8}

    def stored(self, dtype: str, mtp: bool) -> dict[str, Stored]:
        """Return every tensor as files hold it: int8 weights, others in `dtype`. There are no draft layers."""
        int8 = self.int8_weights()
        return {
            name: Stored(INT8 if name in int8 else STORED_DTYPES[dtype], shape)
            for name, shape in self.tensors().items()
        }

    def num_parameters(self, mtp: bool = False) -> int:
        """Count the elements of all tensors except scales of int8 weights."""
        return sum(math.prod(shape) for shape in self.weights().values())

    def int8_weights(self) -> frozenset[str]:
        """Return the names of the int8 weights; each has a tensor of scales."""
        quantization = self.config.quantization
        if quantization is None:
            return frozenset()
        modules = (module for product in self.config.products() for module in product)
        return frozenset(f"{module}.weight" for module in modules if quantization.covers(module))

    def weights(self) -> dict[str, Shape]:
        """Return the shape of every tensor by name, except scales of int8 weights."""
        model, hidden = self.config, self.config.hidden_size
        tensors: dict[str, Shape] = {"model.embed_tokens.weight": (model.vocab_size, hidden)}
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
        return bool(_IGNORED.fullmatch(name)) or (self.config.tied_embeddings and name == "lm_head.weight")


def _mlp_tensors(prefix: str, hidden: int, intermediate: int) -> dict[str, Shape]:
    return {
        f"{prefix}gate_proj.weight": (intermediate, hidden),
        f"{prefix}up_proj.weight": (intermediate, hidden),
        f"{prefix}down_proj.weight": (hidden, intermediate),
    }
