"""Qwen3 and Qwen3-MoE checkpoints: configuration, tensors and KV groups. Torch-free."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

from pypto_serving.errors import ModelError
from pypto_serving.model.checkpoint import INT8
from pypto_serving.model.contents import STORED_DTYPES, Shape, Stored
from pypto_serving.model.fields import Fields
from pypto_serving.model.quantization import SECTION, Quantization, scale_name
from pypto_serving.model.rope import Rope
from pypto_serving.types.kv import DTYPE_BYTES, KVCacheGroupSpec, KVTensorSpec
from pypto_serving.types.model import ModelSpec

_IGNORED = re.compile(r".*\.rotary_emb\.inv_freq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The mixture-of-experts part: which layers have it, and its sizes."""

    layers: tuple[int, ...]
    count: int
    per_token: int
    intermediate_size: int
    normalize: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Config:
    """What the program needs to know of a config.json. `experts` is None for a dense model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    tied_embeddings: bool
    attention_bias: bool
    max_position_embeddings: int
    experts: Experts | None = None
    quantization: Quantization | None = None

    @classmethod
    def from_json(cls, raw: dict[str, Any], source: str) -> Self:
        """Parse a config.json object; raises ModelError naming the key and value that cannot be served."""
        config = Fields(raw, source)
        _refuse_unsupported(config)
        hidden, heads = config.positive_int("hidden_size"), config.positive_int("num_attention_heads")
        kv_heads = config.positive_int("num_key_value_heads", default=heads)
        config.require(heads % kv_heads == 0, "num_key_value_heads", kv_heads, f"a divisor of the {heads} heads")
        head_dim = config.positive_int("head_dim", default=max(1, hidden // heads))
        config.require(head_dim % 2 == 0, "head_dim", head_dim, "even")
        max_len = config.positive_int("max_position_embeddings")
        rope = Rope.from_config(config, head_dim, max_len)
        layers = config.positive_int("num_hidden_layers")
        model = cls(
            vocab_size=config.positive_int("vocab_size"),
            hidden_size=hidden,
            intermediate_size=config.positive_int("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=config.positive_float("rms_norm_eps", default=1e-6),
            rope=rope,
            tied_embeddings=config.flag("tie_word_embeddings", False),
            attention_bias=config.flag("attention_bias", False),
            max_position_embeddings=max(max_len, rope.max_len),
            experts=_read_experts(config, layers),
            quantization=Quantization.from_json(config),
        )
        model._check_quantization(config)
        return model

    def _check_quantization(self, config: Fields) -> None:
        """Raise ModelError where one product has int8 weights in part, or the embedding would have to be int8."""
        if self.quantization is None:
            return
        key, ignore = f"{SECTION}.ignore", list(self.quantization.ignore)
        for modules in self._products():
            covered = [self.quantization.covers(module) for module in modules]
            odd = modules[covered.index(not covered[0])] if len(set(covered)) > 1 else ""
            config.require(not odd, key, ignore, f"the same for {odd} and {modules[0]}, which are one product here")
        tied = self.tied_embeddings and self.quantization.covers("lm_head")
        config.require(not tied, key, ignore, "a list with lm_head, which is the embedding (tie_word_embeddings)")

    def tensors(self) -> dict[str, Shape]:
        """Name and shape of every tensor the checkpoint must have."""
        weights, int8 = self.weights(), self.int8_weights()
        return weights | {scale_name(name): (shape[0], 1) for name, shape in weights.items() if name in int8}

    def stored(self, dtype: str, mtp: bool) -> dict[str, Stored]:
        """Every tensor as files hold it: int8 weights, and all else in `dtype`. There are no draft layers."""
        int8 = self.int8_weights()
        return {
            name: Stored(INT8 if name in int8 else STORED_DTYPES[dtype], shape)
            for name, shape in self.tensors().items()
        }

    def num_parameters(self, mtp: bool = False) -> int:
        """Elements of all tensors but the scales of int8 weights."""
        return sum(math.prod(shape) for shape in self.weights().values())

    def int8_weights(self) -> frozenset[str]:
        """Names of the tensors that are int8; each has a tensor of scales."""
        quantization = self.quantization
        if quantization is None:
            return frozenset()
        modules = (module for product in self._products() for module in product)
        return frozenset(f"{module}.weight" for module in modules if quantization.covers(module))

    def _products(self) -> Iterator[tuple[str, ...]]:
        """Linear layers, in tuples of those whose weights are read together."""
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            yield tuple(f"{prefix}self_attn.{name}_proj" for name in "qkv")
            yield (f"{prefix}self_attn.o_proj",)
            if self.experts is None or layer not in self.experts.layers:
                yield f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj"
                yield (f"{prefix}mlp.down_proj",)
                continue
            experts = [f"{prefix}mlp.experts.{expert}." for expert in range(self.experts.count)]
            yield (f"{prefix}mlp.gate",)
            yield tuple(f"{expert}{name}_proj" for expert in experts for name in ("gate", "up"))
            yield tuple(f"{expert}down_proj" for expert in experts)
        if not self.tied_embeddings:
            yield ("lm_head",)

    def weights(self) -> dict[str, Shape]:
        """Name and shape of every tensor but the scales of int8 weights."""
        hidden = self.hidden_size
        tensors: dict[str, Shape] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            tensors |= {prefix + name: shape for name, shape in self._layer_tensors(layer).items()}
        tensors["model.norm.weight"] = (hidden,)
        if not self.tied_embeddings:
            tensors["lm_head.weight"] = (self.vocab_size, hidden)
        return tensors

    def _layer_tensors(self, layer: int) -> dict[str, Shape]:
        hidden, queries = self.hidden_size, self.num_heads * self.head_dim
        keys = self.num_kv_heads * self.head_dim
        rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": hidden}
        tensors: dict[str, Shape] = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
        tensors |= {f"self_attn.{name}.weight": (self.head_dim,) for name in ("q_norm", "k_norm")}
        for name, size in rows.items():
            tensors[f"self_attn.{name}.weight"] = (size, queries if name == "o_proj" else hidden)
            if self.attention_bias:
                tensors[f"self_attn.{name}.bias"] = (size,)
        if self.experts is None or layer not in self.experts.layers:
            return tensors | _mlp_tensors("mlp.", hidden, self.intermediate_size)
        tensors["mlp.gate.weight"] = (self.experts.count, hidden)
        for expert in range(self.experts.count):
            tensors |= _mlp_tensors(f"mlp.experts.{expert}.", hidden, self.experts.intermediate_size)
        return tensors

    def ignores(self, name: str) -> bool:
        """True for tensors that some checkpoints carry and nothing needs."""
        return bool(_IGNORED.fullmatch(name)) or (self.tied_embeddings and name == "lm_head.weight")

    def kv_groups(self, dtype: str, block_size: int) -> tuple[KVCacheGroupSpec, ...]:
        """One full-history group: keys after norm and rotation, and values."""
        layers = tuple(range(self.num_layers))
        row = (self.num_kv_heads, self.head_dim)
        tensors = tuple(KVTensorSpec(name=n, layers=layers, dtype=dtype, row_shape=row) for n in ("k", "v"))
        return (KVCacheGroupSpec(name="kv", kind="full", tensors=tensors, block_size=block_size),)

    def spec(self, path: str, architecture: str, dtype: str, block_size: int) -> ModelSpec:
        """The checkpoint as the engine sees it. In torch a tied embedding lies in memory twice: as table and packed."""
        num_parameters = self.num_parameters()
        resident = num_parameters + (self.vocab_size * self.hidden_size if self.tied_embeddings else 0)
        return ModelSpec(
            path=path,
            architecture=architecture,
            dtype=dtype,
            num_layers=self.num_layers,
            vocab_size=self.vocab_size,
            max_position_embeddings=self.max_position_embeddings,
            num_parameters=num_parameters,
            weight_bytes=resident * DTYPE_BYTES[dtype],
            packed_bytes=self._packed_bytes(dtype),
            position_bytes=self.rope.position_bytes,
            needs_torch=self._needs_torch(dtype, block_size),
            quantization=self.quantization.name if self.quantization else "",
            kv_groups=self.kv_groups(dtype, block_size),
        )

    def _packed_bytes(self, dtype: str) -> int:
        """Int8 weights have a scale and a compensation, 4 bytes each, for every output."""
        int8 = self.int8_weights()
        return sum(
            shape[0] * (shape[1] + 8) if name in int8 else math.prod(shape) * DTYPE_BYTES[dtype]
            for name, shape in self.weights().items()
        )

    def _needs_torch(self, dtype: str, block_size: int) -> str:
        """Why the CPU kernels cannot serve the model, if so; see csrc/ops.h for the layouts behind the numbers."""
        experts = self.experts
        sparse = () if experts is None else (experts.intermediate_size,)
        has_dense = experts is None or len(experts.layers) < self.num_layers
        widths = (*sparse, self.intermediate_size) if has_dense else sparse
        if dtype != "bfloat16":
            return "the kernels serve --dtype bfloat16 only"
        if block_size % 32:
            return f"the kernels need a --block-size that is a multiple of 32, not {block_size}"
        if self.head_dim % 32 or self.head_dim > 256:
            return f"the kernels need a head_dim of 32, 64, ... 256, not {self.head_dim}"
        if self.num_heads // self.num_kv_heads > 96:
            return "the kernels share a key among at most 96 queries"
        if self.quantization is not None and self.hidden_size % 4:
            return f"int8 weights need a hidden_size that is a multiple of 4, not {self.hidden_size}"
        if self.quantization is not None and max(self.hidden_size, *widths, self.num_heads * self.head_dim) >= 1 << 17:
            return "sums of int8 products need sizes below 131,072"
        if self.hidden_size % 2 or any(width % 16 for width in widths):
            return f"the kernels need an even hidden_size and intermediate sizes that are multiples of 16, not {widths}"
        return ""


def _mlp_tensors(prefix: str, hidden: int, intermediate: int) -> dict[str, Shape]:
    return {
        f"{prefix}gate_proj.weight": (intermediate, hidden),
        f"{prefix}up_proj.weight": (intermediate, hidden),
        f"{prefix}down_proj.weight": (hidden, intermediate),
    }


def _refuse_unsupported(config: Fields) -> None:
    sliding = config.flag("use_sliding_window", False)
    config.require(not sliding, "use_sliding_window", sliding, "false: sliding windows are not supported here")
    kinds = config.get("layer_types") or []
    config.require(set(kinds) <= {"full_attention"}, "layer_types", kinds, "full_attention in every layer")
    activation = config.get("hidden_act") or "silu"
    config.require(activation == "silu", "hidden_act", activation, '"silu"')


def _read_experts(config: Fields, num_layers: int) -> Experts | None:
    """The expert layers, as transformers places them; None when there are none."""
    if config.get("model_type") != "qwen3_moe":
        return None
    count = config.natural("num_experts", "num_local_experts")
    step = config.positive_int("decoder_sparse_step", default=1)
    dense = config.int_list("mlp_only_layers")
    layers = tuple(i for i in range(num_layers) if i not in dense and count > 0 and (i + 1) % step == 0)
    if not layers:
        return None
    per_token = config.positive_int("num_experts_per_tok", default=8)
    if per_token > count:
        raise ModelError(f"num_experts_per_tok is {per_token}, but must be at most num_experts, {count}")
    return Experts(
        layers=layers,
        count=count,
        per_token=per_token,
        intermediate_size=config.positive_int("moe_intermediate_size"),
        normalize=config.flag("norm_topk_prob", False),
    )
