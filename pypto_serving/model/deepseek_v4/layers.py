"""Hyper-connections, rotation and experts of DeepSeek V4.

Element-wise functions that are not exactly rounded treat the tail of a long tensor by another formula, and so would
make a row's result depend on its neighbours: `steady` computes them in pieces without a tail, since steps have a
multiple of 8 rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pypto_serving.model.deepseek_v4.config import DeepseekV4Config
from pypto_serving.model.deepseek_v4.parts import Experts, HyperConnections
from pypto_serving.model.layers import Linear, rms_norm, run_experts
from pypto_serving.model.loader import Weights
from pypto_serving.model.tensors import require_ids

MIN_ROWS = 8
"""Rows of a step are a multiple of this, so that 4 values of each fill whole vectors."""

SMALLEST_SUM = 1e-20
"""Added to sums of scores, all of which may be zero."""

_PIECE = 1 << 14


def steady(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` of each element of x [n, k], in pieces that no thread shares."""
    rows = max(1, _PIECE // x.shape[1] // MIN_ROWS) * MIN_ROWS
    return torch.cat([function(piece) for piece in x.split(rows)])


def add_up(x: Tensor, dim: int) -> Tensor:
    """Sum over a short dimension, first to last."""
    return functools.reduce(torch.add, x.unbind(dim))


def matrix(weights: Weights, *names: str, dtype: torch.dtype | None = None) -> Linear:
    """The named matrices as one, outputs one after the other."""
    return Linear(weights.lend(*(f"{name}.weight" for name in names), dtype=dtype))


def vector(weights: Weights, name: str) -> Tensor:
    """A tensor in float32."""
    return weights.read(name, dtype=torch.float32)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [n, ..., d] with its last channels turned in pairs of neighbours; cos and sin are [n, pairs]. Float32.

    (even, odd) becomes (even cos - odd sin, even sin + odd cos).
    """
    shape = (len(x), *[1] * (x.dim() - 2), -1)
    cos, sin = cos.view(shape), sin.view(shape)
    kept, turned = x[..., : -2 * cos.shape[-1]], x[..., -2 * cos.shape[-1] :]
    even, odd = turned[..., ::2], turned[..., 1::2]
    pairs = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return torch.cat([kept, pairs.flatten(-2)], dim=-1)


class StreamMixer:
    """How a sublayer reads the residual streams and writes them: manifold-constrained hyper-connections.

    Xie et al. 2026, of which DeepSeek V4 mixes with m = fn rms(streams), [streams | streams | streams^2].
    """

    def __init__(self, weights: Weights, prefix: str, hyper: HyperConnections, norm_eps: float) -> None:
        self.fn = Linear(weights.lend(f"{prefix}_fn", dtype=torch.float32))
        self.base, self.scale = vector(weights, f"{prefix}_base"), vector(weights, f"{prefix}_scale")
        self.hyper, self.norm_eps = hyper, norm_eps

    def _mix(self, h: Tensor) -> Tensor:
        return self.fn(rms_norm(h.flatten(1), None, self.norm_eps))

    def read(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of h [t, n, d]: the input [t, d], weights of the output [t, n], and weights among streams [t, n, n].

        The last are made doubly stochastic, sums over the first and second axis about 1, by Sinkhorn's iteration.
        """
        n, eps = self.hyper.streams, self.hyper.eps
        before, after, among = self._mix(h).split([n, n, n * n], dim=1)
        before = steady(torch.sigmoid, before * self.scale[0] + self.base[:n]) + eps
        after = 2 * steady(torch.sigmoid, after * self.scale[1] + self.base[n : 2 * n])
        square = (among * self.scale[2] + self.base[2 * n :]).view(-1, n, n)
        square = torch.softmax(square, dim=2) + eps
        square = square / (add_up(square, 1)[:, None] + eps)
        for _ in range(self.hyper.iterations - 1):
            square = square / (add_up(square, 2)[..., None] + eps)
            square = square / (add_up(square, 1)[:, None] + eps)
        return add_up(before[..., None] * h, 1), after, square

    def collapse(self, h: Tensor) -> Tensor:
        """The one stream [t, d] that leaves the last layer."""
        before = steady(torch.sigmoid, self._mix(h) * self.scale + self.base) + self.hyper.eps
        return add_up(before[..., None] * h, 1)


def write_streams(h: Tensor, y: Tensor, after: Tensor, among: Tensor) -> Tensor:
    """h'_k = after_k y + sum over j of among[j, k] h_j, for h [t, n, d] and y [t, d]."""
    kept = add_up(among[..., None] * h[:, :, None], 1)
    return kept + after[..., None] * y[:, None]


class ClampedMLP:
    """down(silu(min(gate(x), limit)) * clamp(up(x))). Where it is large, silu grows, so that it is clamped instead."""

    def __init__(self, weights: Weights, prefix: str, limit: float) -> None:
        self.gate, self.up, self.down = (matrix(weights, f"{prefix}.{name}") for name in ("w1", "w3", "w2"))
        self.limit = limit
        self.silu_limit = float(F.silu(torch.tensor(limit)))

    def __call__(self, x: Tensor) -> Tensor:
        """[n, hidden] to [n, hidden]."""
        gated = self.gate.silu(x).clamp(max=self.silu_limit)
        return self.down(gated * self.up(x).clamp(-self.limit, self.limit))

    def linears(self) -> list[Linear]:
        return [self.gate, self.up, self.down]


class ExpertLayer:
    """A shared expert, and the ones that a token's id or its scores choose; the scores weigh either."""

    def __init__(self, model: DeepseekV4Config, weights: Weights, layer: int) -> None:
        prefix = f"layers.{layer}.ffn."
        self.sizes: Experts = model.experts
        limit = self.sizes.limit
        self.router = matrix(weights, f"{prefix}gate", dtype=torch.float32)
        self.by_id = layer in self.sizes.hash_layers
        if self.by_id:
            name = f"{prefix}gate.tid2eid"
            self.choice = weights.read(name, dtype=torch.int64)
            require_ids(name, int(self.choice.min()), int(self.choice.max()), self.sizes.count)
        else:
            self.choice = vector(weights, f"{prefix}gate.bias")
        self.experts = [ClampedMLP(weights, f"{prefix}experts.{e}", limit) for e in range(self.sizes.count)]
        self.shared = ClampedMLP(weights, f"{prefix}shared_experts", limit)

    def __call__(self, x: Tensor, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Float32 [t, hidden] to [t, hidden]; experts compute in `dtype`."""
        weights, chosen = self._route(x, token_ids)
        rounded = x.to(dtype)
        return run_experts(self.experts, rounded, weights, chosen) + self.shared(rounded)

    def _route(self, x: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Weights, float32, and experts, int64, [t, per_token]; of equal scores the lower expert's counts more."""
        scores = steady(lambda piece: F.softplus(piece).sqrt(), self.router(x))
        if self.by_id:
            chosen = self.choice.index_select(0, token_ids)
        else:
            order = torch.sort(scores + self.choice, dim=1, descending=True, stable=True).indices
            chosen = order[:, : self.sizes.per_token]
        weights = scores.gather(1, chosen)
        return weights / (add_up(weights, 1)[:, None] + SMALLEST_SUM) * self.sizes.scale, chosen

    def linears(self) -> list[Linear]:
        return [self.router, *self.shared.linears(), *(linear for e in self.experts for linear in e.linears())]
