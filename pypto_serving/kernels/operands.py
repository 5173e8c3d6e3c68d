"""Operands of recorded operations, and the fields of csrc/ops.h made from them."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import numpy as np

from pypto_serving.kernels.abi import Handle
from pypto_serving.kernels.constants import GATE_HALF
from pypto_serving.kernels.forms import Int8Strips, Matrix, StripColumns, Strips, activations, multiplies, strip_columns
from pypto_serving.types.arrays import Array, BFloat16Array, Float32Array, UInt8Array

KV_SCALE_BYTES = 4
"""Bytes of the scale of an int8 key or value."""


class StepRows(enum.Enum):
    """The rows that an operation works on: tokens of a step, tokens that need logits, or residual streams of tokens."""

    TOKENS = enum.auto()
    LOGITS = enum.auto()
    STREAMS = enum.auto()


class Epilogue(enum.Enum):
    """Final operation of a GEMM on its sums; see csrc/ops.h."""

    STORE = enum.auto()
    ADD = enum.auto()
    SWIGLU = enum.auto()
    STRIPS = enum.auto()


class Scoring(enum.Enum):
    """Function from router logits to scores and expert weights; see csrc/ops.h."""

    SOFTMAX = enum.auto()
    RENORMALIZED = enum.auto()
    SQRT_SOFTPLUS = enum.auto()


@dataclass(frozen=True, slots=True)
class KVCacheLayer:
    """One layer of a KV cache: pages [blocks, layers, k or v, kv_heads, numbers of a head].

    The numbers of a head are bfloat16 as uint16, block_size * dim; or int8 as uint8, block_size * (dim +
    KV_SCALE_BYTES). `heads`: kv heads to work on, by default all.
    """

    pages: BFloat16Array | UInt8Array
    layer: int
    dim: int
    heads: range | None = None

    def fields(self) -> dict[str, Any]:
        """Return the fields of KvCache in csrc/ops.h. Raises ValueError for pages that are not contiguous."""
        if not self.pages.flags.c_contiguous:
            raise ValueError("KV cache pages must be contiguous")
        int8, (_, _, _, kv_heads, elements) = self.pages.dtype == np.uint8, self.pages.shape
        heads = range(kv_heads) if self.heads is None else self.heads
        mine = slice(heads.start, heads.stop)
        keys, values = (self.pages[:1, self.layer, half, mine].view(np.uint32) for half in (0, 1))
        size = elements // (self.dim + KV_SCALE_BYTES if int8 else self.dim)
        sizes = {"kv_heads": len(heads), "dim": self.dim, "size": size, "int8": int8}
        return {"keys": keys, "values": values, "block_stride": self.pages.strides[0] // 4, **sizes}


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Handle of the paged rows of one tensor in one layer of a KV group."""

    handle: Handle


@dataclass(frozen=True, slots=True, kw_only=True)
class NormRopeParams:
    """RMSNorm, scale and partial RoPE of vectors of length `dim`; see NormRopeParams in csrc/ops.h.

    RMSNorm is skipped if eps < 0; `weight` [dim] defaults to ones. RoPE rotates interleaved pairs of the trailing
    `rope_dim` dimensions; `cos` and `sin` are [positions, rope_dim / 2].
    """

    dim: int
    cos: Float32Array
    sin: Float32Array
    eps: float = -1.0
    weight: Float32Array | None = None
    scale: float = 1.0

    @property
    def rope_dim(self) -> int:
        """Dimensions that RoPE rotates."""
        return 2 * int(self.cos.shape[1])

    def fields(self) -> dict[str, Any]:
        """Return the fields of NormRopeParams in csrc/ops.h."""
        sizes = {"dim": self.dim, "rope_dim": self.rope_dim, "eps": self.eps, "scale": self.scale}
        return {"weight": self.weight, "cos": self.cos, "sin": self.sin, **sizes}


@dataclass(frozen=True, slots=True)
class MlaSizes:
    """Query `heads` to compute, sliding `window` in tokens, and heads per `group` of the output projection.

    The window holds no rows before position `begin`.
    """

    heads: range
    window: int
    group: int
    begin: int = 0


@dataclass(frozen=True, slots=True)
class Routing:
    """Handle of a recorded routing: the experts of each token in one layer."""

    handle: Handle
    experts: int
    per_token: int


UNGROUPED = 1 << 40
"""Number of outputs per group if all outputs share one input: larger than any output count."""


def strip_words(x: Strips, words: str = "x", scales: str = "x_scales") -> dict[str, Array | None]:
    """Return the fields of activations: their words, and their scales if they are int8."""
    if isinstance(x, np.ndarray):
        return {words: x, scales: None}
    return {words: x.words, scales: x.scales if isinstance(x, Int8Strips) else None}


def _inputs(x: Strips, matrix: Matrix) -> dict[str, Any]:
    """Return the fields of a GEMM's inputs. Raises ValueError if no kernel takes this kind of inputs."""
    if not multiplies(matrix.form, x):
        raise ValueError(f"{type(x).__name__} are no activations for weights of {matrix.form}")
    weights = {"weight": matrix.words, "scales": matrix.scales, "compensation": matrix.compensation}
    return {**strip_words(x), **weights, "inputs": activations(x)["inputs"], **matrix.form.fields()}


def gemm_fields(x: Strips, matrix: Matrix, epilogue: Epilogue, out: Array | StripColumns) -> dict[str, Any]:
    """Return the fields of Linear that every GEMM needs.

    Raises TypeError if `out` does not have the epilogue's dtype, and ValueError for sizes that it cannot write.
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


def first_row(x: Array) -> tuple[Array, int]:
    """Return the first row of x [rows, width], which may be a slice of columns, and the row stride in elements.

    Raises ValueError if the elements of a row are not contiguous.
    """
    stride, step = x.strides
    if step != x.itemsize:
        raise ValueError(f"rows of {list(x.shape)} are not contiguous")
    return x[:1], stride // step


def routing_fields(logits: Float32Array, per_token: int, scoring: Scoring, computed: range) -> dict[str, Any]:
    """Return the fields of Routing that are sizes and results; this rank has the matrices of the experts `computed`.

    Raises ValueError if `per_token` exceeds the number of experts.
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
