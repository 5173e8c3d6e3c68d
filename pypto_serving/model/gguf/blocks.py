"""The types of GGUF's weights: how a row's blocks become float32, as ggml computes it, bit by bit. Torch-free.

A row of k weights is k / `weights` blocks of `bytes`, one after the other. Within a block, `d`, `m` and `dmin` are
half-precision scales; `q` are codes. See https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
"""Blocks, uint8 [blocks, bytes], or a part of each."""
Floats = NDArray[np.float32]

_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type: blocks of `weights` in `bytes`. decode: blocks [n, bytes] to float32 [n, weights]."""

    name: str
    weights: int
    bytes: int
    decode: Callable[[Bytes], Floats]
    halves: tuple[int, ...] = ()
    """Where a block has its half-precision scales."""

    def dequantize(self, rows: Bytes) -> Floats:
        """Decode rows, uint8 [n, bytes of a row], to float32 [n, k]."""
        return self.decode(rows.reshape(-1, self.bytes)).reshape(len(rows), -1)


def _half(blocks: Bytes, at: int) -> Floats:
    """Read a half-precision number at byte `at` of each block, float32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(q: Bytes) -> Bytes:
    """Split bytes: all lower halves, then all upper ones."""
    return np.concatenate([q & 15, q >> 4], axis=-1)


def _bits(blocks: Bytes, at: int) -> Bytes:
    """Return 32 bits from byte `at` on, uint8 [n, 32], lowest first."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")


def _floats(dtype: str) -> Callable[[Bytes], Floats]:
    return lambda blocks: np.ascontiguousarray(blocks).view(dtype).astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return (np.ascontiguousarray(blocks).view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q4_0(b: Bytes) -> Floats:
    return _half(b, 0) * (_nibbles(b[:, 2:]).astype(np.float32) - 8)


def _q4_1(b: Bytes) -> Floats:
    return _half(b, 0) * _nibbles(b[:, 4:]).astype(np.float32) + _half(b, 2)


def _q5_0(b: Bytes) -> Floats:
    q = _nibbles(b[:, 6:]) | _bits(b, 2) << 4
    return _half(b, 0) * (q.astype(np.float32) - 16)


def _q5_1(b: Bytes) -> Floats:
    q = _nibbles(b[:, 8:]) | _bits(b, 4) << 4
    return _half(b, 0) * q.astype(np.float32) + _half(b, 2)


def _q8_0(b: Bytes) -> Floats:
    return _half(b, 0) * b[:, 2:].view(np.int8).astype(np.float32)


def _shifted(q: Bytes, width: int, bits: int) -> Bytes:
    """Split runs of `width` bytes into their fields of `bits`: [n, bytes] to [n, bytes * 8 / bits], run by run.

    A run gives the lowest field of all its bytes, then the next one, and so on.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    fields = q.reshape(len(q), -1, 1, width) >> shifts[:, None] & np.uint8((1 << bits) - 1)
    return fields.reshape(len(q), -1)


def _grouped(scales: Floats, q: NDArray[np.float32]) -> Floats:
    """Multiply each group of codes by its scale: [n, groups] by [n, weights]."""
    return (scales[:, :, None] * q.reshape(*scales.shape, -1)).reshape(len(q), -1)


def _minus(values: Floats, minimums: Floats) -> Floats:
    return (values.reshape(*minimums.shape, -1) - minimums[:, :, None]).reshape(len(values), -1)


def _q2_k(b: Bytes) -> Floats:
    scales, q = b[:, :16], _shifted(b[:, 16:80], 32, 2).astype(np.float32)
    low, high = (scales & 15).astype(np.float32), (scales >> 4).astype(np.float32)
    return _minus(_grouped(_half(b, 80) * low, q), _half(b, 82) * high)


def _q3_k(b: Bytes) -> Floats:
    q = _shifted(b[:, 32:96], 32, 2).astype(np.int8)
    clear = _shifted(b[:, :32], 32, 1) == 0
    stored = b[:, 96:108]
    low = np.concatenate([stored[:, :8] & 15, stored[:, :8] >> 4], axis=1)
    high = _shifted(stored[:, 8:], 4, 2)
    scales = (low | high << 4).astype(np.float32) - 32
    return _grouped(_half(b, 108) * scales, (q - 4 * clear).astype(np.float32))


def _scales_and_minimums(s: Bytes) -> tuple[Floats, Floats]:
    """Unpack the twelve bytes of Q4_K and Q5_K: 6 bits for each of eight scales and eight minimums."""
    first, second, last = s[:, :4], s[:, 4:8], s[:, 8:]
    scales = np.concatenate([first & 63, last & 15 | first >> 6 << 4], axis=1)
    minimums = np.concatenate([second & 63, last >> 4 | second >> 6 << 4], axis=1)
    return scales.astype(np.float32), minimums.astype(np.float32)


def _q4_k(b: Bytes) -> Floats:
    scales, minimums = _scales_and_minimums(b[:, 4:16])
    q = _shifted(b[:, 16:], 32, 4).astype(np.float32)
    return _minus(_grouped(_half(b, 0) * scales, q), _half(b, 2) * minimums)


def _q5_k(b: Bytes) -> Floats:
    scales, minimums = _scales_and_minimums(b[:, 4:16])
    q = _shifted(b[:, 48:], 32, 4) | _shifted(b[:, 16:48], 32, 1) << 4
    return _minus(_grouped(_half(b, 0) * scales, q.astype(np.float32)), _half(b, 2) * minimums)


def _q6_k(b: Bytes) -> Floats:
    q = _shifted(b[:, :128], 64, 4) | _shifted(b[:, 128:192], 32, 2) << 4
    scales = b[:, 192:208].view(np.int8).astype(np.float32)
    return _grouped(_half(b, 208) * scales, q.astype(np.float32) - 32)


def _iq4_nl(b: Bytes) -> Floats:
    return _half(b, 0) * _IQ4[_nibbles(b[:, 2:])]


def _iq4_xs(b: Bytes) -> Floats:
    high = np.ascontiguousarray(b[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = np.stack([b[:, 4:8] & 15, b[:, 4:8] >> 4], axis=-1).reshape(len(b), 8)
    scales = (low | high << 4).astype(np.float32) - 32
    return _grouped(_half(b, 0) * scales, _IQ4[_shifted(b[:, 8:], 16, 4)])


def _mxfp4(b: Bytes) -> Floats:
    return np.exp2(b[:, :1].astype(np.float32) - 127) * _E2M1[_nibbles(b[:, 1:])]


def _nvfp4(b: Bytes) -> Floats:
    exponent, fraction = (b[:, :4] >> 3 & 15).astype(np.int32), (b[:, :4] & 7).astype(np.float32)
    scales = np.where(exponent == 0, fraction / 512, np.ldexp(1 + fraction / 8, exponent - 7)).astype(np.float32)
    scales[b[:, :4] & 127 == 127] = 0
    return _grouped(scales, _E2M1[_shifted(b[:, 4:], 8, 4)])


TYPES = {
    0: BlockType("F32", 1, 4, _floats("<f4")),
    1: BlockType("F16", 1, 2, _floats("<f2")),
    2: BlockType("Q4_0", 32, 18, _q4_0, (0,)),
    3: BlockType("Q4_1", 32, 20, _q4_1, (0, 2)),
    6: BlockType("Q5_0", 32, 22, _q5_0, (0,)),
    7: BlockType("Q5_1", 32, 24, _q5_1, (0, 2)),
    8: BlockType("Q8_0", 32, 34, _q8_0, (0,)),
    10: BlockType("Q2_K", 256, 84, _q2_k, (80, 82)),
    11: BlockType("Q3_K", 256, 110, _q3_k, (108,)),
    12: BlockType("Q4_K", 256, 144, _q4_k, (0, 2)),
    13: BlockType("Q5_K", 256, 176, _q5_k, (0, 2)),
    14: BlockType("Q6_K", 256, 210, _q6_k, (208,)),
    20: BlockType("IQ4_NL", 32, 18, _iq4_nl, (0,)),
    23: BlockType("IQ4_XS", 256, 136, _iq4_xs, (0,)),
    30: BlockType("BF16", 1, 2, _bf16),
    39: BlockType("MXFP4", 32, 17, _mxfp4),
    40: BlockType("NVFP4", 64, 36, _nvfp4),
}
"""The types that can be read, by ggml's numbers."""
_INFINITE_HALF, _LARGEST_E8M0 = 0x7C, 250


def are_finite(type: BlockType, rows: Bytes) -> bool:
    """Return whether the scales of blocks are finite, judging by their bits."""
    blocks = rows.reshape(-1, type.bytes)
    if type.name == "MXFP4":
        return bool((blocks[:, 0] <= _LARGEST_E8M0).all())
    return all(bool(((blocks[:, at + 1] & _INFINITE_HALF) != _INFINITE_HALF).all()) for at in type.halves)
