"""Every type of block against the gguf package, bit by bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from pypto_serving.model.gguf.blocks import TYPES
from tests.model.gguf.random_blocks import random_blocks


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
