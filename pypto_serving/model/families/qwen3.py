"""Qwen3 and Qwen3-MoE: norms of query and key heads, and experts in some layers."""

from __future__ import annotations

from typing import Any

from pypto_serving.model.decoder.recipe import DecoderConfig, ExpertsRecipe, sliding_window
from pypto_serving.model.decoder.spec import decoder_family
from pypto_serving.model.families.qwen2 import window_of
from pypto_serving.model.fields import MOST_EXPERTS, MOST_LAYERS, Fields


def parse(raw: dict[str, Any], source: str) -> DecoderConfig:
    """Read the object in config.json at `source`. Raises ModelError naming an unsupported key and value."""
    config = Fields(raw, source)
    bias = config.flag("attention_bias", False)
    mixture = config.get("model_type") == "qwen3_moe"
    experts, layers = _experts(config) if mixture else (None, range(0))
    window = sliding_window(config, config.flag("use_sliding_window", False)) if mixture else window_of(config)
    return DecoderConfig.from_fields(
        config,
        head_norms=True,
        qkv_bias=bias,
        o_bias=bias,
        window=window,
        experts=lambda layer: experts if layer in layers else None,
    )


def _experts(config: Fields) -> tuple[ExpertsRecipe | None, set[int] | range]:
    """Read the experts, and the layers that have them, as transformers does."""
    num_layers = config.positive_int("num_hidden_layers", most=MOST_LAYERS)
    count = config.natural("num_experts", "num_local_experts", most=MOST_EXPERTS // num_layers)
    step, dense = config.positive_int("decoder_sparse_step", default=1), config.int_list("mlp_only_layers")
    layers = {layer for layer in range(num_layers) if count and layer not in dense and (layer + 1) % step == 0}
    if not layers:
        return None, layers
    per_token = config.positive_int("num_experts_per_tok", default=8)
    config.require(per_token <= count, "num_experts_per_tok", per_token, f"at most num_experts, {count}")
    width, normalize = config.positive_int("moe_intermediate_size"), config.flag("norm_topk_prob", False)
    return ExpertsRecipe(count=count, per_token=per_token, width=width, normalize=normalize), layers


FAMILY = decoder_family(parse)
