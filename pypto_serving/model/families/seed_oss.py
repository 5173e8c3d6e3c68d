"""Seed-OSS: Llama with biases of queries, keys and values."""

from __future__ import annotations

from typing import Any

from pypto_serving.model.decoder.recipe import DecoderConfig
from pypto_serving.model.decoder.spec import decoder_family
from pypto_serving.model.fields import Fields


def parse(raw: dict[str, Any], source: str) -> DecoderConfig:
    """Read the object in config.json at `source`. Raises ModelError naming an unsupported key and value."""
    config = Fields({"num_key_value_heads": 8} | raw, source)
    return DecoderConfig.from_fields(
        config,
        qkv_bias=config.flag("attention_bias", True),
        o_bias=config.flag("attention_out_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
    )


FAMILY = decoder_family(parse)
