"""What operations of a recording work on: rows of a step, paged caches, and how vectors are rotated and routed."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import numpy as np

from pypto_serving.kernels.arguments import Handle
from pypto_serving.types.arrays import BFloat16Array, Float32Array, UInt8Array

KV_SCALE_BYTES = 4
"""Bytes of the scale of a key or value of int8."""


class StepRows(enum.Enum):
    """Rows of a step that an operation works on: tokens, those that need logits, or residual streams of tokens."""

    TOKENS = enum.auto()
    LOGITS = enum.auto()
    STREAMS = enum.auto()


class Epilogue(enum.Enum):
    """What a GEMM does with its sums; see csrc/ops.h."""

    STORE = enum.auto()
    ADD = enum.auto()
    SWIGLU = enum.auto()
    STRIPS = enum.auto()


class Scoring(enum.Enum):
    """How router logits become scores and expert weights; see csrc/ops.h."""

    SOFTMAX = enum.auto()
    RENORMALIZED = enum.auto()
    SQRT_SOFTPLUS = enum.auto()


@dataclass(frozen=True, slots=True)
class KVCacheLayer:
    """One layer of a KV cache: pages [blocks, layers, k or v, kv_heads, numbers of a head].

    Pages are bfloat16 as uint16, block_size * dim numbers; or int8 as uint8, block_size * (dim + KV_SCALE_BYTES).
    `heads` are the kv heads to work on, by default all.
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
    """RMSNorm, scale and partial RoPE of vectors of `dim`; see NormRopeParams in csrc/ops.h.

    RMSNorm is skipped where eps < 0; `weight` [dim] defaults to ones. RoPE rotates interleaved pairs of the trailing
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
    """The model's query heads to compute, sliding window in tokens, and heads in a group of the output projection.

    The window has no rows before position `begin`.
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
