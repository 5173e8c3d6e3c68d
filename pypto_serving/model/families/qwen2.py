"""Qwen2 and Qwen2.5: biases of queries, keys and values."""

from __future__ import annotations

from typing import Any

from pypto_serving.model.decoder.recipe import DecoderConfig, sliding_window
from pypto_serving.model.decoder.spec import decoder_family
from pypto_serving.model.fields import Fields


def parse(raw: dict[str, Any], source: str) -> DecoderConfig:
    """Read the object in config.json at `source`. Raises ModelError naming an unsupported key and value."""
    config = Fields(raw, source)
    return DecoderConfig.from_fields(config, qkv_bias=True, window=window_of(config))


def window_of(config: Fields) -> int | None:
    """Read the window of the layers from `max_window_layers` on; None if there are none."""
    first, layers = config.natural("max_window_layers", default=28), config.positive_int("num_hidden_layers")
    return sliding_window(config, config.flag("use_sliding_window", False) and first < layers)


FAMILY = decoder_family(parse)
