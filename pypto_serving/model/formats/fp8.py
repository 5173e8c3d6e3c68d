"""Sections with `quant_method` fp8: F8_E4M3 weights with a scale per block, as Qwen releases them. Torch-free.

Tensors: `weight` and `weight_scale_inv`, which multiplies despite its name, in bfloat16, float16, float32 or e8m0.
"""

from __future__ import annotations

from pypto_serving.kernels.constants import FP8_INPUTS
from pypto_serving.model.checkpoint import FLOATS
from pypto_serving.model.fields import Fields
from pypto_serving.model.formats.eight_bits import BLOCK, E8M0, Fp8
from pypto_serving.model.formats.modules import EVERY, by_part, names_in
from pypto_serving.model.formats.quantization import SECTION, Quantization, SchemeRule, require
from pypto_serving.model.formats.schemes import PLAIN

SCALES = (*FLOATS, E8M0, "U8")


def read(section: Fields) -> Quantization:
    """Read the section `quantization_config`. Raises ModelError naming the field of another scheme."""
    require(section, "fmt", ("e4m3", None))
    require(section, "activation_scheme", ("dynamic", "static", None))
    require(section, "scale_fmt", ("ue8m0", "float", None))
    left_out = by_part(names_in(section, SECTION, "modules_to_not_convert", "ignored_layers"))
    block = read_block(section)
    # One scale for a matrix has been written under both names.
    names = ("weight_scale_inv",) if block[0] else ("weight_scale_inv", "weight_scale")
    schemes = tuple(Fp8(block, name, SCALES) for name in names)
    return Quantization(
        (
            SchemeRule(left_out, (PLAIN,)),
            SchemeRule(by_part(["lm_head"]), (PLAIN, *schemes)),
            SchemeRule(EVERY, schemes),
        )
    )


def read_block(section: Fields) -> tuple[int, int]:
    """Read rows and columns of a block; (0, 0) for one scale per matrix."""
    block = section.get("weight_block_size")
    if block is None:
        return 0, 0
    both = isinstance(block, list) and len(block) == 2
    both = both and all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in block)
    section.require(both and block[1] % FP8_INPUTS == 0, f"{SECTION}.weight_block_size", block, BLOCK)
    return block[0], block[1]
