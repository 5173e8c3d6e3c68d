"""The CPU kernels of `csrc/`: a shared library that is there if a C++ compiler was when the package was built."""

from __future__ import annotations

from pypto_serving.kernels.engine import PANEL, Engine, Matrix, Quads, Stored, Strips, hashes, zeros
from pypto_serving.kernels.library import runnable
from pypto_serving.kernels.recording import (
    INDEX_TOKENS,
    CacheLayer,
    LatentSizes,
    Pages,
    Recording,
    Routing,
    Rows,
    Scoring,
    Turning,
)
from pypto_serving.kernels.sampling import NativeSampler

__all__ = [
    "INDEX_TOKENS",
    "PANEL",
    "CacheLayer",
    "Engine",
    "LatentSizes",
    "Matrix",
    "NativeSampler",
    "Pages",
    "Quads",
    "Recording",
    "Routing",
    "Rows",
    "Scoring",
    "Stored",
    "Strips",
    "Turning",
    "hashes",
    "runnable",
    "zeros",
]
