"""Read `quantization_config` of config.json, by `quant_method`, or of a file beside it. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pypto_serving.model.fields import Fields, read_json_file
from pypto_serving.model.formats import compressed_tensors, fp8, gptq_awq, modelopt
from pypto_serving.model.formats.quantization import SECTION, Quantization, require

_METHODS: dict[str, Callable[[Fields], Quantization]] = {
    "compressed-tensors": compressed_tensors.read,
    "fp8": fp8.read,
    "gptq": gptq_awq.read_gptq,
    "awq": gptq_awq.read_awq,
    "auto-round": gptq_awq.read_auto_round,
    "modelopt": modelopt.read,
}

MODELOPT_FILE, GPTQ_FILE = SECTION_FILES = ("hf_quant_config.json", "quantize_config.json")
"""The section by itself, as modelopt and AutoGPTQ write it; old versions leave it out of config.json."""


def section_file(directory: Path) -> Path | None:
    """Return the file beside config.json that holds the section, if there is one."""
    return next((directory / name for name in SECTION_FILES if (directory / name).is_file()), None)


def read_section_file(path: Path) -> dict[str, Any]:
    """Return what `path` says as `quantization_config`. Raises ModelError naming `path` if that cannot be read."""
    fields = Fields(read_json_file(path), str(path))
    if path.name == GPTQ_FILE:
        section = {"quant_method": "gptq", **fields.values}
    else:
        section = {"quant_method": "modelopt", **fields.section("quantization").values}
    read_quantization(Fields({SECTION: section}, str(path)))
    return section


def read_quantization(config: Fields) -> Quantization | None:
    """Read how matrices are stored; None if none is quantised. Raises ModelError for schemes that cannot be read."""
    if config.get(SECTION) is None:
        return None
    section = config.section(SECTION)
    return _METHODS[require(section, "quant_method", tuple(_METHODS))](section)
