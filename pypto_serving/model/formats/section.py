"""Read `quantization_config` of config.json, or of a file beside it, by `quant_method`. Torch-free.

fp8: F8_E4M3 weights with a scale per block, as Qwen releases them. The tensor `weight_scale_inv` multiplies despite its
    name, in bfloat16, float16, float32 or e8m0.
modelopt: NVFP4 weights, https://github.com/NVIDIA/TensorRT-Model-Optimizer. What the KV cache is rounded to is left to
    options.
gguf: files that `model/gguf` unpacked: each matrix is plain, or in blocks of the type that its file says.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pypto_serving.kernels.constants import FP8_INPUTS
from pypto_serving.model.checkpoint import FLOATS
from pypto_serving.model.fields import Fields, read_json_file
from pypto_serving.model.formats import compressed_tensors, gptq_awq
from pypto_serving.model.formats.quantization import (
    EVERY,
    SECTION,
    Quantization,
    SchemeRule,
    by_part,
    by_wildcard,
    names_in,
    require,
)
from pypto_serving.model.formats.schemes import BLOCK, E8M0, MODELOPT_NVFP4, PLAIN, Fp8

SCALES = (*FLOATS, E8M0, "U8")


def read_fp8(section: Fields) -> Quantization:
    """Read the section `quantization_config`. Raises ModelError naming the field of another scheme."""
    require(section, "fmt", ("e4m3", None))
    require(section, "activation_scheme", ("dynamic", "static", None))
    require(section, "scale_fmt", ("ue8m0", "float", None))
    left_out = by_part(names_in(section, SECTION, "modules_to_not_convert", "ignored_layers"))
    block = _read_block(section)
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


def _read_block(section: Fields) -> tuple[int, int]:
    """Read rows and columns of a block; (0, 0) for one scale per matrix."""
    block = section.get("weight_block_size")
    if block is None:
        return 0, 0
    both = isinstance(block, list) and len(block) == 2
    both = both and all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in block)
    section.require(both and block[1] % FP8_INPUTS == 0, f"{SECTION}.weight_block_size", block, BLOCK)
    return block[0], block[1]


def read_modelopt(section: Fields) -> Quantization:
    """Read the section `quantization_config`. Raises ModelError naming the field of another scheme."""
    require(section, "quant_algo", ("NVFP4",))
    require(section, "group_size", (MODELOPT_NVFP4.group, None))
    left_out = by_wildcard(names_in(section, SECTION, "ignore", "exclude_modules"))
    return Quantization((SchemeRule(left_out, (PLAIN,)), SchemeRule(EVERY, (MODELOPT_NVFP4,))))


_METHODS: dict[str, Callable[[Fields], Quantization]] = {
    "compressed-tensors": compressed_tensors.read,
    "fp8": read_fp8,
    "gptq": gptq_awq.read_gptq,
    "awq": gptq_awq.read_awq,
    "auto-round": gptq_awq.read_auto_round,
    "modelopt": read_modelopt,
    "gguf": lambda _: Quantization(()),
}

MODELOPT_FILE, *_ = SECTION_FILES = ("hf_quant_config.json", "quant_config.json", "quantize_config.json")
"""Files of modelopt, AutoAWQ and AutoGPTQ with only the section; old versions omit it from config.json."""
_ONLY_AWQ = ("w_bit", "zero_point")


def section_file(directory: Path) -> Path | None:
    """Return the file beside config.json that holds the section, if there is one."""
    return next((directory / name for name in SECTION_FILES if (directory / name).is_file()), None)


def read_section_file(path: Path) -> dict[str, Any]:
    """Return the `quantization_config` in `path`. Raises ModelError naming `path` if it cannot be read."""
    fields = Fields(read_json_file(path), str(path))
    if path.name == MODELOPT_FILE:
        section = {"quant_method": "modelopt", **fields.section("quantization").values}
    else:
        section = {"quant_method": "gptq" if fields.get(*_ONLY_AWQ) is None else "awq", **fields.values}
    read_quantization(Fields({SECTION: section}, str(path)))
    return section


def read_quantization(config: Fields) -> Quantization | None:
    """Read the schemes of matrices; return None without quantization. Raises ModelError for unsupported schemes."""
    if config.get(SECTION) is None:
        return None
    section = config.section(SECTION)
    return _METHODS[require(section, "quant_method", tuple(_METHODS))](section)
