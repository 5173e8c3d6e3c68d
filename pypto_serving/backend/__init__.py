"""Backends: one lazily imported file each. Only `backend/x.py` imports x's runtime."""

from __future__ import annotations

from pypto_serving.util import LazyRegistry

BACKENDS = LazyRegistry(
    "backend",
    {
        "cpu": "pypto_serving.backend.cpu:CpuBackend",
        "null": "pypto_serving.backend.null.program:NullBackend",
    },
)
