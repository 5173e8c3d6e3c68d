"""Instruction sets on which tests of answers run: the last bits of logits differ between them."""

from __future__ import annotations

from pypto_serving.kernels import runnable

ANSWERING = tuple(name for name in runnable() if name in (runnable()[0], "avx2", "portable")) or ("torch",)
"""The best of this machine, and those that others have; torch where there are no kernels."""
