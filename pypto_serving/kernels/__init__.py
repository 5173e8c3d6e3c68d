"""The CPU kernels of `csrc/`: a shared library that is there if a C++ compiler was when the package was built."""

from __future__ import annotations

from pypto_serving.kernels.engine import (
    PANEL,
    CacheLayer,
    Engine,
    Matrix,
    Quads,
    Recording,
    Routing,
    Rows,
    Stored,
    Strips,
    hashes,
    zeros,
)
from pypto_serving.kernels.library import runnable
from pypto_serving.kernels.sampling import NativeSampler

__all__ = [
    "PANEL",
    "CacheLayer",
    "Engine",
    "Matrix",
    "NativeSampler",
    "Quads",
    "Recording",
    "Routing",
    "Rows",
    "Stored",
    "Strips",
    "hashes",
    "runnable",
    "zeros",
]
