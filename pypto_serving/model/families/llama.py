"""Llama 2 and 3, and the many models of their shape."""

from __future__ import annotations

from typing import Any

from pypto_serving.model.decoder.recipe import DecoderConfig
from pypto_serving.model.decoder.spec import decoder_family
from pypto_serving.model.fields import Fields


def parse(raw: dict[str, Any], source: str) -> DecoderConfig:
    """Read the object in config.json at `source`. Raises ModelError naming an unsupported key and value."""
    config = Fields(raw, source)
    bias = config.flag("attention_bias", False)
    return DecoderConfig.from_fields(config, qkv_bias=bias, o_bias=bias, mlp_bias=config.flag("mlp_bias", False))


FAMILY = decoder_family(parse)
