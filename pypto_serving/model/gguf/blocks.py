"""The types of GGUF's weights: how a row's blocks become float32, as ggml computes it, bit by bit. Torch-free.

A row of k weights is k / `weights` blocks of `bytes`, one after the other. Within a block, `d`, `m` and `dmin` are
half-precision scales; `q` are codes. See https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pypto_serving.model.gguf.grids import IQ1_S, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS

Bytes = NDArray[np.uint8]
"""Blocks, uint8 [blocks, bytes], or a part of each."""
Floats = NDArray[np.float32]
Words = NDArray[np.integer]
"""Codes of more than 8 bits."""

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


def _words(b: Bytes, dtype: str) -> Words:
    return np.ascontiguousarray(b).view(dtype).astype(np.uint32)


def _signs(b: Bytes) -> Floats:
    """Return -1 for each set bit, else 1: float32 [n, bits], the lowest bit of a byte first."""
    return 1 - 2 * np.unpackbits(b, axis=1, bitorder="little").astype(np.float32)


def _even_signs(words: Words) -> Floats:
    """Return the signs of 8 weights each by 7 bits; the last makes the number of negative ones even."""
    q = words & 127
    parity = q ^ q >> 4
    parity ^= parity >> 2
    return _signs((q | ((parity ^ parity >> 1) & 1) << 7).astype(np.uint8))


def _quarters(words: Words) -> Words:
    """Return the four fields of 7 bits of each word, [n, 4 words]."""
    return (words[:, :, None] >> np.arange(0, 28, 7, dtype=np.uint32)).reshape(len(words), -1)


def _high(b: Bytes, bits: int) -> Words:
    """Return the fields of each byte, lowest first, as bits 8 and up of codes."""
    return _shifted(b, 1, bits).astype(np.uint32) << 8


def _iq1(scales: Floats, codes: Words, negative: NDArray[np.bool_]) -> Floats:
    """Multiply rows of the table, moved by an eighth, by their scales."""
    moved = IQ1_S[codes] + np.where(negative, np.float32(-0.125), np.float32(0.125))[:, :, None]
    return _grouped(scales, moved.reshape(len(codes), -1))


def _iq1_s(b: Bytes) -> Floats:
    high = _words(b[:, 34:], "<u2")
    codes = b[:, 2:34] | (high[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint32) & 7).reshape(len(b), 32) << 8
    scales = _half(b, 0) * (2 * (high >> 12 & 7) + 1).astype(np.float32)
    return _iq1(scales, codes, np.repeat(high >> 15 == 1, 4, axis=1))


def _iq1_m(b: Bytes) -> Floats:
    """The scale of a block is cut into the upper halves of four words."""
    high, words = _shifted(b[:, 32:48], 1, 4), _words(b[:, 48:], "<u2")
    bits = (words >> 12 << np.arange(0, 16, 4, dtype=np.uint32)).sum(axis=1, dtype=np.uint32)
    d = bits.astype("<u2").view("<f2").astype(np.float32)[:, None]
    scales = (words[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint32) & 7).reshape(len(b), 16)
    codes = b[:, :32] | (high & 7).astype(np.uint32) << 8
    return _iq1(d * (2 * scales + 1).astype(np.float32), codes, high & 8 != 0)


def _iq2_xxs(b: Bytes) -> Floats:
    words = _words(b[:, 2:], "<u4")[:, 1::2]
    grid = IQ2_XXS[b[:, 2:].reshape(-1, 8, 8)[:, :, :4]].reshape(len(b), -1)
    scales = _half(b, 0) * (np.float32(0.5) + (words >> 28).astype(np.float32)) * np.float32(0.25)
    return _grouped(scales, grid * _even_signs(_quarters(words)))


def _iq2_xs(b: Bytes) -> Floats:
    words = _words(b[:, 2:66], "<u2")
    scales = _half(b, 0) * (np.float32(0.5) + _shifted(b[:, 66:], 1, 4)) * np.float32(0.25)
    return _grouped(scales, IQ2_XS[words & 511].reshape(len(b), -1) * _even_signs(words >> 9))


def _iq2_s(b: Bytes) -> Floats:
    codes = b[:, 2:34] | _high(b[:, 66:74], 2)
    scales = _half(b, 0) * (np.float32(0.5) + _shifted(b[:, 74:], 1, 4)) * np.float32(0.25)
    return _grouped(scales, IQ2_S[codes].reshape(len(b), -1) * _signs(b[:, 34:66]))


def _iq3_xxs(b: Bytes) -> Floats:
    words = _words(b[:, 66:], "<u4")
    scales = _half(b, 0) * (np.float32(0.5) + (words >> 28).astype(np.float32)) * np.float32(0.5)
    return _grouped(scales, IQ3_XXS[b[:, 2:66]].reshape(len(b), -1) * _even_signs(_quarters(words)))


def _iq3_s(b: Bytes) -> Floats:
    codes = b[:, 2:66] | _high(b[:, 66:74], 1)
    scales = _half(b, 0) * (1 + 2 * _shifted(b[:, 106:], 1, 4).astype(np.float32))
    return _grouped(scales, IQ3_S[codes].reshape(len(b), -1) * _signs(b[:, 74:106]))


def _tq1_0(b: Bytes) -> Floats:
    """Five weights a byte: the digits of a number in base 3, of which each product moves the first out at the top."""
    parts = [(b[:, :32], 5), (b[:, 32:48], 5), (b[:, 48:52], 4)]
    powers = np.array([1, 3, 9, 27, 81], np.uint8)
    digits = [(q[:, None] * powers[:count, None]).reshape(len(b), -1) for q, count in parts]
    q = np.concatenate(digits, axis=1).astype(np.uint16) * 3 >> 8
    return _half(b, 52) * (q.astype(np.float32) - 1)


def _tq2_0(b: Bytes) -> Floats:
    return _half(b, 64) * (_shifted(b[:, :64], 32, 2).astype(np.float32) - 1)


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
    16: BlockType("IQ2_XXS", 256, 66, _iq2_xxs, (0,)),
    17: BlockType("IQ2_XS", 256, 74, _iq2_xs, (0,)),
    18: BlockType("IQ3_XXS", 256, 98, _iq3_xxs, (0,)),
    19: BlockType("IQ1_S", 256, 50, _iq1_s, (0,)),
    20: BlockType("IQ4_NL", 32, 18, _iq4_nl, (0,)),
    21: BlockType("IQ3_S", 256, 110, _iq3_s, (0,)),
    22: BlockType("IQ2_S", 256, 82, _iq2_s, (0,)),
    23: BlockType("IQ4_XS", 256, 136, _iq4_xs, (0,)),
    29: BlockType("IQ1_M", 256, 56, _iq1_m),
    30: BlockType("BF16", 1, 2, _bf16),
    34: BlockType("TQ1_0", 256, 54, _tq1_0, (52,)),
    35: BlockType("TQ2_0", 256, 66, _tq2_0, (64,)),
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
