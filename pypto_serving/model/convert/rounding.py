"""The target formats of matrices: round rows of weights to few bits. Torch-free.

A format is a scheme of `formats`, and a section of compressed-tensors in config.json. Rounding takes no calibration
data, and results depend on the weights alone: all sums are added in one order. A byte holds two codes of 4 bits, the
even one in the low half.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pypto_serving.kernels import round_int4, runnable
from pypto_serving.model.checkpoint import bfloat16
from pypto_serving.model.formats.schemes import MXFP4, Int8, Scheme, int4
from pypto_serving.model.formats.values import E2M1
from pypto_serving.types.arrays import Array, BFloat16Array, Float32Array, UInt8Array

INT4_LEVELS: Float32Array = np.array([7, 7.5, 8, 8.75, 9.75, 11], np.float32)
"""Levels of int4 tried for the largest magnitude of a group. Above 8 it is clipped, and the others get finer steps.

These six come within a few percent of 400 levels. In groups of 32 they lower the error of a product from 9.4 to 8.5 %.
"""
MXFP4_GROUP = 32
_SMALLEST = np.finfo(np.float32).tiny
"""Smallest scale: smaller ones have no inverse in float32. Smaller weights become 0."""
_LARGEST_EXPONENT = 2
"""Exponent of 6, the largest 4-bit float."""


def to_int8(rows: Float32Array) -> tuple[NDArray[np.int8], Float32Array]:
    """Round rows [m, k], overwriting them, to codes [m, k] and scales [m, 1]; ties round to even."""
    scales = _tops(rows)[:, None] / np.float32(127)
    scales[scales == 0] = 1
    codes = np.rint(np.divide(rows, scales, out=rows), out=rows)
    return np.clip(codes, -127, 127, out=rows).astype(np.int8), scales


def to_int4(rows: Float32Array, size: int) -> tuple[UInt8Array, BFloat16Array]:
    """Round rows [m, k] to packed codes 0 to 15, which mean -8 to 7, and scales [m, k / size] in bfloat16.

    Each group gets the scale with the least squared error among some. For codes q of weights w the best scale is
    w q / q q, and leaves the error w w - (w q)^2 / q q.
    """
    return round_int4(rows, size, INT4_LEVELS) if runnable() else to_int4_in_numpy(rows, size)


def to_int4_in_numpy(rows: Float32Array, size: int) -> tuple[UInt8Array, BFloat16Array]:
    """Compute the same bits as `to_int4`, without kernels."""
    weights = _columns(rows, size)
    tops, codes, products = np.abs(weights).max(axis=0), np.empty_like(weights), np.empty_like(weights)
    best, scales = np.full_like(tops, -1), np.ones_like(tops)
    for level in INT4_LEVELS:
        _round_int4(weights, tops / level, codes)
        along = np.multiply(weights, codes, out=products).sum(axis=0)
        across = np.multiply(codes, codes, out=products).sum(axis=0)
        across[across == 0] = 1
        scale = along / across
        gain = scale * along
        better = gain > best
        best[better], scales[better] = gain[better], scale[better]
    stored = bfloat16(scales)
    _round_int4(weights, (stored.astype(np.uint32) << 16).view(np.float32), codes)
    return _packed((codes + 8).astype(np.uint8), rows.shape), stored.reshape(len(rows), -1)


def to_mxfp4(rows: Float32Array) -> tuple[UInt8Array, UInt8Array]:
    """Round rows [m, k] to packed codes of 4-bit floats and scales [m, k / 32], exponents with a bias of 127.

    The scale of a group puts its largest magnitude in [4, 8), and clips it to 6. A scale twice as large is taken if the
    squared error is less.
    """
    weights = _columns(rows, MXFP4_GROUP)
    exponents = np.frexp(np.abs(weights).max(axis=0))[1] - 1 - _LARGEST_EXPONENT
    fine, coarse = (_round_mxfp4(weights, exponents + more) for more in (0, 1))
    use_coarse = coarse[2] < fine[2]
    codes = np.where(use_coarse, coarse[0], fine[0])
    scales = np.where(use_coarse, coarse[1], fine[1])
    return _packed(codes, rows.shape), scales.reshape(len(rows), -1)


def _tops(rows: Float32Array) -> Float32Array:
    """Return the largest magnitude of each row."""
    tops: Float32Array = np.maximum(rows.max(axis=1), -rows.min(axis=1))
    return tops


def _columns(rows: Float32Array, size: int) -> Float32Array:
    """Copy rows [m, k] to [size, groups]: groups side by side, so that loops run over many of them."""
    return np.ascontiguousarray(rows.reshape(-1, size).T)


def _packed(codes: UInt8Array, shape: tuple[int, ...]) -> UInt8Array:
    """Pack codes [size, groups] by rows."""
    rows = np.ascontiguousarray(codes.T).reshape(shape)
    return np.bitwise_or(rows[:, 0::2], rows[:, 1::2] << 4, dtype=np.uint8)


def _round_int4(weights: Float32Array, scales: Float32Array, codes: Float32Array) -> None:
    """Write the codes -8 to 7 of groups [size, m]."""
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales >= _SMALLEST)
    np.multiply(weights, inverse, out=codes)
    np.clip(np.rint(codes, out=codes), -8, 7, out=codes)


def _round_mxfp4(weights: Float32Array, exponents: NDArray[np.int32]) -> tuple[UInt8Array, UInt8Array, Float32Array]:
    """Return codes, biased exponents and squared errors of groups [32, m]."""
    biased = np.clip(exponents + 127, 0, 254)
    magnitudes = np.minimum(np.abs(np.ldexp(weights, 127 - biased)), np.float32(6))
    # From 1 on a code has the two lowest bits of the exponent and one of the mantissa; below 1, steps of a half.
    bits = magnitudes.view(np.uint32)
    rounded = (bits + 0x1FFFFF + (bits >> 22 & 1)) >> 22
    halves = np.rint(2 * magnitudes).astype(np.uint8)
    codes = np.where(magnitudes < 1, halves, (rounded - np.uint32(252)).astype(np.uint8))
    codes |= np.signbit(weights).astype(np.uint8) << 3
    errors = np.ldexp(E2M1[codes], biased - 127) - weights
    return codes, biased.astype(np.uint8), np.multiply(errors, errors, out=errors).sum(axis=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """Writes a matrix as `scheme`. `name` is for people, `format` the one of compressed-tensors.

    dtypes: stored dtypes of tensors by last component, where the scheme allows several.
    weights, inputs: what the group of config.json says of weights, and of activations.
    encode: encode finite rows [m, k]; return rows of every tensor by last component.
    """

    name: str
    format: str
    scheme: Scheme
    dtypes: Mapping[str, str]
    weights: Mapping[str, Any]
    inputs: Mapping[str, Any] | None = None
    encode: Callable[[Float32Array], dict[str, Array]]


def w8a8(scale: str = "weight_scale") -> Encoding:
    """Return int8 with a scale per output, a tensor called `scale`: the largest magnitude of each becomes 127."""
    int8 = {"num_bits": 8, "type": "int", "symmetric": True}

    def encode(rows: Float32Array) -> dict[str, Array]:
        codes, scales = to_int8(rows)
        return {"weight": codes, scale: scales}

    return Encoding(
        name="w8a8",
        format="int-quantized",
        scheme=Int8(scale),
        dtypes={scale: "F32"},
        weights={**int8, "strategy": "channel", "dynamic": False},
        inputs={**int8, "strategy": "token", "dynamic": True},
        encode=encode,
    )


def w4a16(size: int) -> Encoding:
    """Return int4 with a bfloat16 scale per group of `size` inputs."""
    int4_groups = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": size}

    def encode(rows: Float32Array) -> dict[str, Array]:
        codes, scales = to_int4(rows, size)
        return {"weight_packed": codes.view("<i4"), "weight_scale": scales}

    return Encoding(
        name=f"w4a16 g{size}",
        format="pack-quantized",
        scheme=int4(size, zeros=False),
        dtypes={"weight_scale": "BF16", "weight_shape": "I64"},
        weights={**int4_groups, "dynamic": False},
        encode=encode,
    )


def mxfp4() -> Encoding:
    """Return 4-bit floats with a power of two per 32 inputs."""
    fp4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": MXFP4.group}

    def encode(rows: Float32Array) -> dict[str, Array]:
        codes, scales = to_mxfp4(rows)
        return {"weight_packed": codes, "weight_scale": scales}

    return Encoding(
        name="mxfp4",
        format="mxfp4-pack-quantized",
        scheme=MXFP4,
        dtypes={"weight_scale": "U8"},
        weights={**fp4, "dynamic": False, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"},
        encode=encode,
    )


def section(encoding: Encoding, ignore: list[str]) -> dict[str, Any]:
    """Return `quantization_config` for all linear layers but those of `ignore`."""
    group = {"targets": ["Linear"], "weights": encoding.weights, "input_activations": encoding.inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": encoding.format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "output_activations": None}},
        "ignore": ignore,
        "kv_cache_scheme": None,
    }
