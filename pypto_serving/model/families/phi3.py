"""Phi-3, Phi-3.5 and Phi-4: one matrix for queries, keys and values, one for gate and up, and LongRoPE."""

from __future__ import annotations

from typing import Any

from pypto_serving.model.decoder.recipe import DecoderConfig, TensorNames, sliding_window
from pypto_serving.model.decoder.spec import decoder_family
from pypto_serving.model.fields import Fields

_NAMES = TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
_SCALING = ("rope_parameters", "rope_scaling")
_OLD_KINDS = ("su", "yarn")
"""Names of LongRoPE in the first releases."""


def parse(raw: dict[str, Any], source: str) -> DecoderConfig:
    """Read the object in config.json at `source`. Raises ModelError naming an unsupported key and value."""
    config = Fields({"rms_norm_eps": 1e-5} | raw, source)
    scaling = config.section(*_SCALING)
    if scaling.get("rope_type", "type") in _OLD_KINDS:
        renamed = {**scaling.values, "rope_type": "longrope"}
        config = Fields({**config.values, **dict.fromkeys(_SCALING, renamed)}, source)
    window = sliding_window(config, True)
    return DecoderConfig.from_fields(config, window=window, names=_NAMES, rotates_in_part=True)


FAMILY = decoder_family(parse)
