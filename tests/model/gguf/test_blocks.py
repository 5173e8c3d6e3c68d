"""Every type of block against the gguf package, bit by bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from pypto_serving.model.gguf.blocks import TYPES, BlockType

SCALES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
}
"""The first bytes of each half-precision scale in a block."""


def random_blocks(type: BlockType, count: int) -> np.ndarray:
    """Blocks of random bytes with finite scales."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (count, type.bytes), dtype=np.uint8)
    for at in SCALES.get(type.name, []):
        blocks[:, at : at + 2] = rng.standard_normal(count).astype("<f2").view(np.uint8).reshape(count, 2)
    if type.name == "MXFP4":
        blocks[:, 0] = rng.integers(100, 140, count)
    if type.name == "NVFP4":
        blocks[:, :4] &= 127
    return blocks


@pytest.mark.parametrize("number", TYPES)
def test_values(number: int) -> None:
    type = TYPES[number]
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == (type.weights, type.bytes)
    if type.weights == 1:
        values = np.linspace(-3, 3, 8, dtype=np.float32).reshape(2, 4)
        rows = gguf.quants.quantize(values, gguf.GGMLQuantizationType(number)).view(np.uint8)
        found, wanted = type.dequantize(rows), gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(number))
    else:
        rows = random_blocks(type, 600).reshape(200, -1)
        found, wanted = type.dequantize(rows), gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(number))
    assert found.dtype == np.float32
    assert np.array_equal(found, wanted)
