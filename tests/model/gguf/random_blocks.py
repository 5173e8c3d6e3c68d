"""Blocks of random bytes."""

from __future__ import annotations

import numpy as np

from pypto_serving.model.gguf.blocks import BlockType


def random_blocks(type: BlockType, count: int, seed: int = 0) -> np.ndarray:
    """Blocks of random bytes with finite scales."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, type.bytes), dtype=np.uint8)
    for at in type.halves:
        blocks[:, at : at + 2] = rng.standard_normal(count).astype("<f2").view(np.uint8).reshape(count, 2)
    if type.name == "IQ1_M":  # its scale is spread over four bytes
        blocks[:, 55] &= 0xBF
    if type.name == "MXFP4":
        blocks[:, 0] = rng.integers(100, 140, count)
    if type.name == "NVFP4":
        blocks[:, :4] &= 127
    return blocks
