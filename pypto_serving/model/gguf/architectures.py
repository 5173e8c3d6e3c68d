"""What the metadata of a GGUF file means: config.json, and the names of tensors in a checkpoint. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pypto_serving.errors import ModelError
from pypto_serving.model.fields import MOST_LAYERS, Fields
from pypto_serving.model.gguf.blocks import BlockType
from pypto_serving.model.gguf.container import Gguf, GgufTensor
from pypto_serving.model.rope import Rope
from pypto_serving.util import brief

Rows = Callable[[int, int], NDArray[np.uint8]]
"""Reads rows [first, last) of a tensor as stored."""

_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "mistral3": ("MistralForCausalLM", "mistral"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "seed_oss": ("SeedOssForCausalLM", "seed_oss"),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3"),
}
"""`architectures` and `model_type` of config.json by `general.architecture`."""
_OTHER_KINDS = {
    **dict.fromkeys(("clip", "mmproj"), "a vision encoder, no model"),
    **dict.fromkeys(("bert", "embedding"), "an encoder, which makes no text"),
    "t5": "an encoder-decoder model",
    **dict.fromkeys(("wav", "whisper"), "a model of sounds"),
}
"""What files hold that are no decoders, by parts of `general.architecture`."""
_RANKS = 4
"""The `pooling_type` of rerankers; those of embedding models are other numbers above 0."""
_MIXTRAL = ("MixtralForCausalLM", "mixtral")
_INTERLEAVED = ("llama", "mistral3", "smollm3")
"""Architectures whose rows of queries and keys lie in the order of interleaved pairs."""
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_OWN_NAMES = {
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "seed_oss": {"post_attention_norm": "post_attention_layernorm"},
}
"""Names that only one architecture has."""
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_FREQUENCIES, _SHORT, _LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
_ATTENTION_FACTOR, _GROWTH = "rope.scaling.attn_factor", "attention.temperature_scale"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Llama 3's extension of the context; a file holds only the resulting divisors of frequencies."""
_FACTORS = ("logit_scale", "residual_scale", "embedding_scale", "expert_weights_scale", _ATTENTION_FACTOR)
"""Keys of factors that must be 1 if they are there and nothing reads them; 0 means absent."""
_ABSENT = ("attention.scale", _GROWTH, "attn_logit_softcapping", "final_logit_softcapping")
"""Keys of what must be 0 if it is there and nothing reads it."""


class GgufModel:
    """A model in a GGUF file. Raises ModelError for one of another architecture."""

    def __init__(self, gguf: Gguf) -> None:
        self._gguf = gguf
        self.name = gguf.metadata.get("general.architecture")
        if not isinstance(self.name, str) or self.name not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            kinds = (kind for part, kind in _OTHER_KINDS.items() if part in str(self.name)[:99])
            kind = next((f"{kind} ({brief(self.name)})" for kind in kinds), f"of the architecture {brief(self.name)}")
            raise ModelError(f"{gguf.path} is {kind}; GGUF files of {known} can be served")
        prefix = f"{self.name}."
        own = {key.removeprefix(prefix): value for key, value in gguf.metadata.items() if key.startswith(prefix)}
        if gguf.metadata.get("general.type") == "adapter" or "adapter.type" in gguf.metadata:
            raise ModelError(f"{gguf.path} is an adapter (LoRA) of a {self.name} model; merge it into that model")
        if pooling := own.get("pooling_type"):
            kind = "a reranker" if pooling == _RANKS else "an embedding model"
            raise ModelError(f"{gguf.path} is {kind} (pooling_type {brief(pooling)}), which is not served")
        self._keys = Fields(own, str(gguf.path))
        self._experts = self._keys.natural("expert_count", default=0)
        mixtral = self.name in _INTERLEAVED and self._experts > 0
        self._architecture, self._type = _MIXTRAL if mixtral else _ARCHITECTURES[self.name]
        self.heads = self._keys.positive_int("attention.head_count")
        self.kv_heads = self._keys.positive_int("attention.head_count_kv", default=self.heads)
        hidden = self._keys.positive_int("embedding_length")
        self.head_dim = self._keys.positive_int("attention.key_length", default=max(1, hidden // self.heads))

    def config(self) -> dict[str, Any]:
        """Return the object of config.json, without ids of tokens."""
        keys, tensors = self._keys, self._gguf.tensors
        rotated = keys.positive_int("rope.dimension_count", default=self.head_dim)
        whole = rotated == self.head_dim or self.name == "phi3"
        keys.require(whole, "rope.dimension_count", rotated, f"head_dim, {self.head_dim}")
        values = keys.positive_int("attention.value_length", default=self.head_dim)
        keys.require(values == self.head_dim, "attention.value_length", values, f"head_dim, {self.head_dim}")
        read = {
            _ATTENTION_FACTOR: self.name == "phi3" and _SHORT in tensors,
            _GROWTH: self.name == "mistral3" and keys.get("rope.scaling.type") == "yarn",
        }
        for key in _FACTORS + _ABSENT:
            allowed = (None, 0, 1) if key in _FACTORS else (None, 0)
            holds = keys.get(key) in allowed or read.get(key, False)
            keys.require(holds, key, keys.get(key), f"{allowed[-1]}, or absent")
        width = keys.positive_int("feed_forward_length")
        config: dict[str, Any] = {
            "architectures": [self._architecture],
            "model_type": self._type,
            "dtype": "bfloat16",
            "vocab_size": self._require("token_embd.weight").shape[0],
            "hidden_size": keys.positive_int("embedding_length"),
            "intermediate_size": width,
            "num_hidden_layers": keys.positive_int("block_count", most=MOST_LAYERS),
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": keys.positive_int("context_length"),
            "rms_norm_eps": keys.positive_float("attention.layer_norm_rms_epsilon"),
            "rope_theta": keys.positive_float("rope.freq_base", default=10000.0),
            "tie_word_embeddings": "output.weight" not in tensors,
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in tensors,
            "sliding_window": keys.get("attention.sliding_window") or None,
        }
        if rotated < self.head_dim:
            config["partial_rotary_factor"] = rotated / self.head_dim
        if (scaling := self._rope_scaling(config)) is not None:
            config["rope_scaling"] = scaling
        if self._experts:
            experts = "num_local_experts" if self._architecture == _MIXTRAL[0] else "num_experts"
            config |= {experts: self._experts, "num_experts_per_tok": keys.positive_int("expert_used_count")}
            config |= {"moe_intermediate_size": keys.positive_int("expert_feed_forward_length", default=width)}
            layers = range(config["num_hidden_layers"])
            dense = [layer for layer in layers if f"blk.{layer}.ffn_gate_inp.weight" not in tensors]
            config |= {"norm_topk_prob": True, "mlp_only_layers": dense}
        return config

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], BlockType, Rows]]:
        """Yield name, shape and type of every tensor of the checkpoint, and a function that reads its rows."""
        for name, tensor in self._gguf.tensors.items():
            if name in (_FREQUENCIES, _SHORT, _LONG):
                continue
            found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
            if found is None:
                yield self._outer_name(name), tensor.shape, tensor.type, tensor.blocks
            elif found[2] in _EXPERTS:
                yield from self._of_experts(tensor, found[1], _EXPERTS[found[2]])
            else:
                yield self._in_layer(name, tensor, *found.groups())

    def _outer_name(self, name: str) -> str:
        names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
        module, _, end = name.rpartition(".")
        if module not in names or end != "weight":
            raise ModelError(f"{self._gguf.path}: tensor {name} is not part of a {self.name} model")
        return f"{names[module]}.weight"

    def _in_layer(
        self, name: str, tensor: GgufTensor, layer: str, module: str, end: str
    ) -> tuple[str, Any, BlockType, Rows]:
        names = _LAYER | _OWN_NAMES.get(str(self.name), {})
        if module not in names:
            raise ModelError(f"{self._gguf.path}: tensor {name} is not part of a {self.name} model")
        target = names[module]
        rows: Rows = tensor.blocks
        if self.name in _INTERLEAVED and module in ("attn_q", "attn_k"):
            heads = self.heads if module == "attn_q" else self.kv_heads
            if tensor.shape[0] != heads * self.head_dim:
                raise ModelError(f"{self._gguf.path}: tensor {name} has not {heads} heads of {self.head_dim} rows")
            rows = _halves_first(tensor, heads, end == "bias")
        return f"model.layers.{layer}.{target}.{end}", tensor.shape, tensor.type, rows

    def _of_experts(self, tensor: GgufTensor, layer: str, part: str) -> Iterator[tuple[str, Any, BlockType, Rows]]:
        count, n, k = tensor.shape if len(tensor.shape) == 3 else (0, 0, 0)
        if count != self._experts:
            raise ModelError(f"{self._gguf.path}: tensor {tensor.name} is not of {self._experts} experts")
        for expert in range(count):

            def rows(first: int, last: int, start: int = expert * n) -> NDArray[np.uint8]:
                return tensor.blocks(start + first, start + last)

            yield f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight", (n, k), tensor.type, rows

    def _rope_scaling(self, config: dict[str, Any]) -> dict[str, Any] | None:
        """Return `rope_scaling` of config.json; the divisors of Llama 3's frequencies must be those of its formula."""
        keys = self._keys
        if _SHORT in self._gguf.tensors:
            return self._longrope()
        factors = ("rope.scaling.factor", "rope.scale_linear")
        kind = keys.get("rope.scaling.type") or ("linear" if keys.get(*factors) else None)
        keys.require(kind in (None, "none", "linear", "yarn"), "rope.scaling.type", kind, "none, linear or yarn")
        if kind in ("linear", "yarn"):
            scaling: dict[str, Any] = {"rope_type": kind, "factor": keys.positive_float(*factors)}
            if kind == "yarn":
                if keys.get(_GROWTH):
                    scaling["llama_4_scaling_beta"] = keys.positive_float(_GROWTH)
                length = keys.positive_int("rope.scaling.original_context_length")
                scaling["original_max_position_embeddings"] = length
                scaling["beta_fast"] = keys.positive_float("rope.scaling.yarn_beta_fast", default=32.0)
                scaling["beta_slow"] = keys.positive_float("rope.scaling.yarn_beta_slow", default=1.0)
                if keys.get("rope.scaling.yarn_log_multiplier"):
                    scaling |= {
                        "mscale": 1.0,
                        "mscale_all_dim": keys.positive_float("rope.scaling.yarn_log_multiplier"),
                    }
            return scaling
        if (tensor := self._gguf.tensors.get(_FREQUENCIES)) is None:
            return None
        divisors = tensor.rows(0, 1)[0]
        scaling = {"rope_type": "llama3", "factor": float(divisors.max()), **_LLAMA3}
        length = config["max_position_embeddings"]
        plain, scaled = (
            Rope.from_config(Fields(config | extra, str(self._gguf.path)), self.head_dim, length).frequencies(length)
            for extra in ({}, {"rope_scaling": scaling})
        )
        if tensor.shape != plain.shape or not np.allclose(plain / scaled, divisors, rtol=1e-3):
            raise ModelError(f"{self._gguf.path}: {_FREQUENCIES} does not hold the divisors of Llama 3's frequencies")
        return scaling

    def _longrope(self) -> dict[str, Any]:
        """Return `rope_scaling` of a file with divisors of frequencies for short and for long contexts."""
        short, long = (self._require(name).rows(0, 1)[0].tolist() for name in (_SHORT, _LONG))
        return {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": self._keys.positive_int("rope.scaling.original_context_length"),
            "attention_factor": self._keys.get(_ATTENTION_FACTOR) or None,
        }

    def _require(self, name: str) -> GgufTensor:
        if name not in self._gguf.tensors:
            raise ModelError(f"{self._gguf.path}: tensor {name} is missing")
        return self._gguf.tensors[name]


def _halves_first(tensor: GgufTensor, heads: int, bias: bool) -> Rows:
    """Return a function that reads rows as a checkpoint has them: the first of all pairs of a head, then the second.

    In a file the two rows of a pair are neighbours.
    """
    order = np.arange(tensor.shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).ravel()
    if bias:
        return lambda _, last: tensor.blocks(0, last).reshape(1, len(order), -1)[:, order].reshape(1, -1)

    def rows(first: int, last: int) -> NDArray[np.uint8]:
        wanted = order[first:last]
        low = int(wanted.min())
        return tensor.blocks(low, int(wanted.max()) + 1)[wanted - low]

    return rows
