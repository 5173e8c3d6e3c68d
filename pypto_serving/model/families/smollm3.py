"""SmolLM3: Llama without RoPE in every fourth layer."""

from __future__ import annotations

from typing import Any

from pypto_serving.model.decoder.recipe import DecoderConfig, sliding_window
from pypto_serving.model.decoder.spec import decoder_family
from pypto_serving.model.fields import MOST_LAYERS, Fields

_DEFAULTS = {"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True}


def parse(raw: dict[str, Any], source: str) -> DecoderConfig:
    """Read the object in config.json at `source`. Raises ModelError naming an unsupported key and value."""
    config = Fields(_DEFAULTS | raw, source)
    bias, layers = config.flag("attention_bias", False), config.positive_int("num_hidden_layers", most=MOST_LAYERS)
    still = config.positive_int("no_rope_layer_interval", default=4)
    rotates = config.int_list("no_rope_layers") or tuple((layer + 1) % still for layer in range(layers))
    config.require(len(rotates) >= layers, "no_rope_layers", rotates, f"as long as num_hidden_layers, {layers}")
    window = sliding_window(config, config.flag("use_sliding_window", False) and 0 in rotates[:layers])
    return DecoderConfig.from_fields(
        config,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
        window=window,
        rotates=lambda layer: bool(rotates[layer]),
    )


FAMILY = decoder_family(parse)
