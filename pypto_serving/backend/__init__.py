"""Backends: one lazily imported file each. Only `backend/x.py` imports x's runtime."""

from __future__ import annotations

from pypto_serving.backend.defaults import BACKEND_DEFAULTS
from pypto_serving.util import LazyRegistry

BACKENDS = LazyRegistry("backend", {name: defaults.target for name, defaults in BACKEND_DEFAULTS.items()})
