"""The configuration of a Qwen3 or Qwen3-MoE model, from its config.json. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from pypto_serving.errors import ModelError
from pypto_serving.model.fields import MOST_EXPERTS, MOST_LAYERS, Fields
from pypto_serving.model.formats.quantization import SECTION, Quantization
from pypto_serving.model.formats.schemes import PLAIN
from pypto_serving.model.formats.section import read_quantization
from pypto_serving.model.rope import Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Experts:
    """The mixture of experts: its layers and sizes."""

    layers: tuple[int, ...]
    count: int
    per_token: int
    intermediate_size: int
    normalize: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Config:
    """The values of config.json that programs need. `experts` is None for a dense model."""

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
    experts: Qwen3Experts | None = None
    quantization: Quantization | None = None

    @classmethod
    def from_json(cls, raw: dict[str, Any], source: str) -> Self:
        """Parse a config.json object. Raises ModelError naming an unsupported key and value."""
        config = Fields(raw, source)
        _refuse_unsupported(config)
        hidden, heads = config.positive_int("hidden_size"), config.positive_int("num_attention_heads")
        kv_heads = config.positive_int("num_key_value_heads", default=heads)
        config.require(heads % kv_heads == 0, "num_key_value_heads", kv_heads, f"a divisor of the {heads} heads")
        head_dim = config.positive_int("head_dim", default=max(1, hidden // heads))
        config.require(head_dim % 2 == 0, "head_dim", head_dim, "even")
        max_len = config.positive_int("max_position_embeddings")
        rope = Rope.from_config(config, head_dim, max_len)
        layers = config.positive_int("num_hidden_layers", most=MOST_LAYERS)
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
            quantization=read_quantization(config),
        )
        model._check_quantization(config)
        return model

    @property
    def head(self) -> str:
        """Return the module whose weights are the output layer."""
        return "model.embed_tokens" if self.tied_embeddings else "lm_head"

    def _check_quantization(self, config: Fields) -> None:
        """Raise ModelError if a tied embedding would be quantised."""
        if self.quantization is None or not self.tied_embeddings:
            return
        if self.quantization.schemes("lm_head")[0] != PLAIN:
            ignored = config.section(SECTION).get("ignore")
            wanted = "a list with lm_head, which is the embedding (tie_word_embeddings)"
            config.require(False, f"{SECTION}.ignore", ignored, wanted)


def _refuse_unsupported(config: Fields) -> None:
    sliding = config.flag("use_sliding_window", False)
    config.require(not sliding, "use_sliding_window", sliding, "false: sliding windows are not supported here")
    kinds = config.get("layer_types") or []
    full = isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)
    config.require(full, "layer_types", kinds, "full_attention in every layer")
    activation = config.get("hidden_act") or "silu"
    config.require(activation == "silu", "hidden_act", activation, '"silu"')


def _read_experts(config: Fields, num_layers: int) -> Qwen3Experts | None:
    """Read the experts, which are in the same layers as in transformers; None if there are none."""
    if config.get("model_type") != "qwen3_moe":
        return None
    count = config.natural("num_experts", "num_local_experts", most=MOST_EXPERTS // num_layers)
    step = config.positive_int("decoder_sparse_step", default=1)
    dense = config.int_list("mlp_only_layers")
    layers = tuple(i for i in range(num_layers) if i not in dense and count > 0 and (i + 1) % step == 0)
    if not layers:
        return None
    per_token = config.positive_int("num_experts_per_tok", default=8)
    if per_token > count:
        raise ModelError(f"num_experts_per_tok is {per_token}, but must be at most num_experts, {count}")
    return Qwen3Experts(
        layers=layers,
        count=count,
        per_token=per_token,
        intermediate_size=config.positive_int("moe_intermediate_size"),
        normalize=config.flag("norm_topk_prob", False),
    )
