"""The formats that matrices are converted to, rows by rows. Torch-free.

A format is a scheme of `formats`, and a section of compressed-tensors in config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from pypto_serving.model.convert.rounding import to_int4, to_int8, to_mxfp4
from pypto_serving.model.formats.eight_bits import Int8
from pypto_serving.model.formats.four_bits import MXFP4, int4
from pypto_serving.model.formats.schemes import Scheme
from pypto_serving.types.arrays import Array, Float32Array


class Encoding(Protocol):
    """Writes a matrix as `scheme`. `name` is for people.

    dtypes: stored dtypes of tensors by last component, where the scheme allows several.
    """

    @property
    def name(self) -> str: ...
    @property
    def scheme(self) -> Scheme: ...
    @property
    def dtypes(self) -> Mapping[str, str]: ...
    @property
    def format(self) -> str: ...

    def group(self) -> dict[str, Any]:
        """Return the group of config.json."""

    def encode(self, rows: Float32Array) -> dict[str, Array]:
        """Encode finite rows [m, k]; return rows of every tensor by last component."""


INT8_ROWS = Int8()
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}


@dataclass(frozen=True, slots=True)
class W8A8:
    """int8 with a scale per output: the largest magnitude of each becomes 127."""

    scheme: Int8 = INT8_ROWS

    name = "w8a8"
    format = "int-quantized"

    @property
    def dtypes(self) -> Mapping[str, str]:
        return {self.scheme.scale: "F32"}

    def group(self) -> dict[str, Any]:
        inputs = {**_INT8, "strategy": "token", "dynamic": True}
        return {"weights": {**_INT8, "strategy": "channel", "dynamic": False}, "input_activations": inputs}

    def encode(self, rows: Float32Array) -> dict[str, Array]:
        codes, scales = to_int8(rows)
        return {"weight": codes, self.scheme.scale: scales}


@dataclass(frozen=True, slots=True)
class W4A16:
    """int4 with a bfloat16 scale per group of inputs."""

    size: int

    format = "pack-quantized"
    dtypes: ClassVar[Mapping[str, str]] = {"weight_scale": "BF16", "weight_shape": "I64"}

    @property
    def name(self) -> str:
        return f"w4a16 g{self.size}"

    @property
    def scheme(self) -> Scheme:
        return int4(self.size, zeros=False)

    def group(self) -> dict[str, Any]:
        weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": self.size}
        return {"weights": {**weights, "dynamic": False}, "input_activations": None}

    def encode(self, rows: Float32Array) -> dict[str, Array]:
        codes, scales = to_int4(rows, self.size)
        return {"weight_packed": codes.view("<i4"), "weight_scale": scales}


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """4-bit floats with a power of two per 32 inputs."""

    name = "mxfp4"
    format = "mxfp4-pack-quantized"
    dtypes: ClassVar[Mapping[str, str]] = {"weight_scale": "U8"}
    scheme = MXFP4

    def group(self) -> dict[str, Any]:
        weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": MXFP4.group}
        scales = {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
        return {"weights": {**weights, "dynamic": False, **scales}, "input_activations": None}

    def encode(self, rows: Float32Array) -> dict[str, Array]:
        codes, scales = to_mxfp4(rows)
        return {"weight_packed": codes, "weight_scale": scales}


def section(encoding: Encoding, ignore: list[str]) -> dict[str, Any]:
    """Return `quantization_config` for all linear layers but those of `ignore`."""
    group = {"targets": ["Linear"], **encoding.group(), "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": encoding.format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignore,
        "kv_cache_scheme": None,
    }
