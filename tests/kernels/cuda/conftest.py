"""Kernels of these tests run in the mended interpreter where there is no card."""

import tests.kernels.cuda.interpreter  # noqa: F401
