"""Quantized weights: their forms, and matrices in the layouts of checkpoints. Torch-free."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pypto_serving.types.arrays import Array, Float32Array, UInt8Array


class Table(enum.Enum):
    """The values of 4-bit codes."""

    INT4 = enum.auto()
    """code - 8, or code - zero point"""
    E2M1 = enum.auto()
    """0, .5, 1, 1.5, 2, 3, 4, 6, and with bit 3 set their negatives"""


class Layout(enum.Enum):
    """Layouts of the codes of a stored matrix [n, k]."""

    ROWS = enum.auto()
    """bytes [n, k / 2]: input 2j in the low half of byte j (compressed-tensors, DeepSeek V4, gpt-oss, NVFP4)"""
    GPTQ = enum.auto()
    """int32 [k / 8, n]: input 8r + i in bits 4i of word [r, output]"""
    AWQ = enum.auto()
    """int32 [k, n / 8]: output 8c + (0, 2, 4, 6, 1, 3, 5, 7)[i] in bits 4i of word [input, c]"""
    BYTES = enum.auto()
    """int8 [n, k], values -8 to 7"""


@dataclass(frozen=True, slots=True)
class CodesForm:
    """4-bit codes: per output, `group` inputs (k: per channel) share a scale and, with `zeros`, a zero point.

    `scale_dtype`: the stored dtype, "BF16", "F16", "F32" or "F8_E8M0".
    """

    table: Table
    group: int
    scale_dtype: str
    zeros: bool = False


@dataclass(frozen=True, slots=True)
class Fp8Form:
    """F8_E4M3 weights: `block` = (outputs, inputs) share a float32 scale; (1, k) per channel, (n, k) per tensor."""

    block: tuple[int, int]


@dataclass(frozen=True, slots=True)
class StoredCodes:
    """4-bit codes of a matrix [n, k]; `codes` are the file's bytes.

    `scales` are [n, k / group] in their stored dtype, bfloat16 and F8_E8M0 as uint16 and uint8 bits; `zeros` [n, k /
    group] are 0 to 16. All weights are multiplied by `factor`.
    """

    form: CodesForm
    layout: Layout
    codes: Array
    scales: Array
    zeros: UInt8Array | None = None
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class StoredFp8:
    """F8_E4M3 weights of a matrix [n, k]: the file's bytes, and one scale per block."""

    form: Fp8Form
    weights: Array
    scales: Float32Array


StoredQuantized = StoredCodes | StoredFp8
