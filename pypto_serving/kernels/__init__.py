"""The CPU kernels of `csrc/`: a shared library, present if a C++ compiler was when the package was built."""

from __future__ import annotations

from pypto_serving.kernels.constants import INDEXER_TOKENS, PANEL
from pypto_serving.kernels.engine import Engine, Int8Strips, Matrix, Stored, Strips, hashes, zeros
from pypto_serving.kernels.library import runnable
from pypto_serving.kernels.recording import (
    KVCacheLayer,
    MlaSizes,
    NormRopeParams,
    Pages,
    Recording,
    Routing,
    Rows,
    Scoring,
)
from pypto_serving.kernels.sampling import NativeSampler

__all__ = [
    "INDEXER_TOKENS",
    "PANEL",
    "Engine",
    "Int8Strips",
    "KVCacheLayer",
    "Matrix",
    "MlaSizes",
    "NativeSampler",
    "NormRopeParams",
    "Pages",
    "Recording",
    "Routing",
    "Rows",
    "Scoring",
    "Stored",
    "Strips",
    "hashes",
    "runnable",
    "zeros",
]
