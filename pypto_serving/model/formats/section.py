"""Read `quantization_config` of config.json, by `quant_method`. Torch-free."""

from __future__ import annotations

from collections.abc import Callable

from pypto_serving.model.fields import Fields
from pypto_serving.model.formats import compressed_tensors, fp8, int4_columns, modelopt
from pypto_serving.model.formats.quantization import SECTION, Quantization, require

_METHODS: dict[str, Callable[[Fields], Quantization]] = {
    "compressed-tensors": compressed_tensors.read,
    "fp8": fp8.read,
    "gptq": int4_columns.read_gptq,
    "awq": int4_columns.read_awq,
    "auto-round": int4_columns.read_auto_round,
    "modelopt": modelopt.read,
}


def read_quantization(config: Fields) -> Quantization | None:
    """Read how matrices are stored; None if none is quantised. Raises ModelError for schemes that cannot be read."""
    if config.get(SECTION) is None:
        return None
    section = config.section(SECTION)
    return _METHODS[require(section, "quant_method", tuple(_METHODS))](section)
