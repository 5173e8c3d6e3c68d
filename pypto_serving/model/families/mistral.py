"""Mistral, Ministral 3, the text part of Mistral 3, and Mixtral with its experts in every layer."""

from __future__ import annotations

from typing import Any

from pypto_serving.model.decoder.recipe import DecoderConfig, ExpertsRecipe, TensorNames, sliding_window
from pypto_serving.model.decoder.spec import decoder_family
from pypto_serving.model.fields import MOST_EXPERTS, MOST_LAYERS, Fields

# What transformers takes for keys that are absent, where other families take something else. null is no absent key.
_DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096}
_MINISTRAL3_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
_MIXTRAL_DEFAULTS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6}


def parse(raw: dict[str, Any], source: str) -> DecoderConfig:
    """Read the object in config.json at `source`. Raises ModelError naming an unsupported key and value."""
    config = Fields(_DEFAULTS | raw, source)
    return DecoderConfig.from_fields(config, window=sliding_window(config, True))


def parse_ministral3(raw: dict[str, Any], source: str) -> DecoderConfig:
    """Read the object in a Ministral 3's config.json at `source`. Raises ModelError naming an unsupported value."""
    config = Fields(_MINISTRAL3_DEFAULTS | raw, source)
    return DecoderConfig.from_fields(config, window=sliding_window(config, True))


def parse_mistral3(raw: dict[str, Any], source: str) -> DecoderConfig:
    """Read the text part, a Mistral or a Ministral 3, of a model that also sees. Raises ModelError likewise."""
    return (parse_ministral3 if raw.get("model_type") == "ministral3" else parse)(raw, source)


def parse_mixtral(raw: dict[str, Any], source: str) -> DecoderConfig:
    """Read the object in a Mixtral's config.json at `source`. Raises ModelError naming an unsupported value."""
    config = Fields(_MIXTRAL_DEFAULTS | raw, source)
    layers = config.positive_int("num_hidden_layers", most=MOST_LAYERS)
    count = config.positive_int("num_local_experts", default=8, most=MOST_EXPERTS // layers)
    per_token = config.positive_int("num_experts_per_tok", default=2)
    config.require(per_token <= count, "num_experts_per_tok", per_token, f"at most num_local_experts, {count}")
    width = config.positive_int("intermediate_size")
    experts = ExpertsRecipe(count=count, per_token=per_token, width=width, normalize=True)
    window = sliding_window(config, True)
    return DecoderConfig.from_fields(config, window=window, experts=lambda _: experts, names=TensorNames(mixtral=True))


FAMILY = decoder_family(parse)
MINISTRAL3 = decoder_family(parse_ministral3)
MISTRAL3 = decoder_family(parse_mistral3)
MIXTRAL = decoder_family(parse_mixtral)
