"""Make the fields of operations from strips, matrices and columns of arrays; see csrc/ops.h."""

from __future__ import annotations

from typing import Any

import numpy as np

from pypto_serving.kernels.constants import GATE_HALF
from pypto_serving.kernels.forms import Int8Strips, Matrix, StripColumns, Strips, activations, multiplies, strip_columns
from pypto_serving.kernels.operands import Epilogue, Scoring
from pypto_serving.types.arrays import Array, Float32Array

UNGROUPED = 1 << 40
"""Outputs of a group where all have the same activations: more than there are."""


def strip_words(x: Strips, words: str = "x", scales: str = "x_scales") -> dict[str, Array | None]:
    """Make the fields of activations: their words, and for int8 their scales."""
    if isinstance(x, np.ndarray):
        return {words: x, scales: None}
    return {words: x.words, scales: x.scales if isinstance(x, Int8Strips) else None}


def _inputs(x: Strips, matrix: Matrix) -> dict[str, Any]:
    """Make the fields of a GEMM's inputs. Raises ValueError where none takes such inputs."""
    if not multiplies(matrix.form, x):
        raise ValueError(f"{type(x).__name__} are no activations for weights of {matrix.form}")
    weights = {"weight": matrix.words, "scales": matrix.scales, "compensation": matrix.compensation}
    return {**strip_words(x), **weights, "inputs": activations(x)["inputs"], **matrix.form.fields()}


def gemm_fields(x: Strips, matrix: Matrix, epilogue: Epilogue, out: Array | StripColumns) -> dict[str, Any]:
    """Make the fields of Linear that every GEMM needs.

    Raises TypeError where `out` does not have the dtype that the epilogue writes, ValueError for sizes it cannot write.
    """
    is_rows = epilogue in (Epilogue.STORE, Epilogue.ADD)
    dtype, words = np.float32 if is_rows else np.uint32, out.words if isinstance(out, StripColumns) else out
    if words.dtype != dtype:
        raise TypeError(f"a GEMM with epilogue {epilogue.name} writes {np.dtype(dtype)}, not {words.dtype}")
    if epilogue == Epilogue.STRIPS and matrix.n % GATE_HALF:
        raise ValueError(f"{matrix.n} outputs are not whole half panels")
    fields = _inputs(x, matrix) | {"n": matrix.n, "k": matrix.k, "epilogue": epilogue}
    if isinstance(out, StripColumns) or not is_rows:
        return fields | strip_columns(out, matrix.n // (2 if epilogue == Epilogue.SWIGLU else 1))
    start, stride = first_row(out)
    return fields | {"out": start, "stride": stride, "first": 0}


def gated_epilogue(gates: Float32Array | None) -> Epilogue:
    return Epilogue.SWIGLU if gates is None else Epilogue.STRIPS


def first_row(x: Array) -> tuple[Array, int]:
    """Return the first row of x [rows, width], which may be columns of an array, and the row stride in elements.

    Raises ValueError where the elements of a row are not contiguous.
    """
    stride, step = x.strides
    if step != x.itemsize:
        raise ValueError(f"rows of {list(x.shape)} are not contiguous")
    return x[:1], stride // step


def routing_fields(logits: Float32Array, per_token: int, scoring: Scoring, computed: range) -> dict[str, Any]:
    """Make the fields of Routing that are sizes and results; experts that are `computed` have matrices here.

    Raises ValueError for more experts per token than there are.
    """
    tokens, experts = logits.shape
    if not 1 <= per_token <= experts:
        raise ValueError(f"per_token is {per_token}, but must be between 1 and the {experts} experts")
    scores = np.zeros((tokens, 2, experts), np.float32) if scoring == Scoring.SQRT_SOFTPLUS else None
    return {
        "experts": experts,
        "begin": computed.start,
        "end": computed.stop,
        "per_token": per_token,
        "scoring": scoring,
        "logits": logits,
        "scores": scores,
        "topk_weights": np.zeros(tokens * per_token, np.float32),
        **{name: np.zeros(tokens * per_token, np.int32) for name in ("topk_ids", "order", "place")},
        **{name: np.zeros(experts + 1, np.int32) for name in ("starts", "active")},
    }
