"""Sections of modelopt with NVFP4 weights. What the KV cache is rounded to is left to options. Torch-free.

Source: https://github.com/NVIDIA/TensorRT-Model-Optimizer.
"""

from __future__ import annotations

from pypto_serving.model.fields import Fields
from pypto_serving.model.formats.four_bits import MODELOPT_NVFP4, NVFP4_GROUP
from pypto_serving.model.formats.modules import EVERY, by_wildcard, names_in
from pypto_serving.model.formats.quantization import SECTION, Quantization, SchemeRule, require
from pypto_serving.model.formats.schemes import PLAIN


def read(section: Fields) -> Quantization:
    """Read the section `quantization_config`. Raises ModelError naming the field of another scheme."""
    require(section, "quant_algo", ("NVFP4",))
    require(section, "group_size", (NVFP4_GROUP, None))
    left_out = by_wildcard(names_in(section, SECTION, "ignore", "exclude_modules"))
    return Quantization((SchemeRule(left_out, (PLAIN,)), SchemeRule(EVERY, (MODELOPT_NVFP4,))))
