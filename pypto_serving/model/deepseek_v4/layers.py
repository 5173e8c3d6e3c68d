"""Hyper-connections, RoPE and MoE of DeepSeek V4.

For element-wise functions that are not exactly rounded, torch computes the tail of a long tensor by another formula, so
a row's result would depend on its neighbours. `steady` computes such functions in pieces without a tail. This relies on
the number of rows of a step, a multiple of 8.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pypto_serving.kernels.constants import GATE_HALF
from pypto_serving.model.checkpoint import require_ids
from pypto_serving.model.collectives import TorchCollectives
from pypto_serving.model.deepseek_v4.config import DeepseekV4Config, HyperConnections
from pypto_serving.model.layers import GatedMLP, Linear, SplitExperts, SplitMLP, rms_norm
from pypto_serving.model.loader import TorchWeights

MIN_ROWS = 8
"""The number of rows of a step is a multiple of this, so that 4 values per row fill whole vectors."""

SMALLEST_SUM = 1e-20
"""Added to the sum of expert scores before dividing by it, since the sum may be zero."""

_PIECE = 1 << 14
_ROUTER_UNIT = 4
"""Router outputs are split over ranks in units of this many."""


def steady(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply an element-wise `function` to x [n, k], in pieces that torch computes in one thread each."""
    rows = max(1, _PIECE // x.shape[1] // MIN_ROWS) * MIN_ROWS
    return torch.cat([function(piece) for piece in x.split(rows)])


def add_up(x: Tensor, dim: int) -> Tensor:
    """Sum over a short dimension, in order."""
    return functools.reduce(torch.add, x.unbind(dim))


def matrix(
    weights: TorchWeights, *names: str, dtype: torch.dtype | None = None, outputs: range | None = None
) -> Linear:
    """Concatenate `outputs` of each named matrix, by default all outputs."""
    rows = None if outputs is None else [outputs] * len(names)
    return Linear(weights.lend(*(f"{name}.weight" for name in names), dtype=dtype, rows=rows))


def vector(weights: TorchWeights, name: str) -> Tensor:
    """Read a tensor in float32."""
    return weights.read(name, dtype=torch.float32)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to interleaved pairs of the last channels of x [n, ..., d]; cos and sin are [n, pairs]. All float32.

    (even, odd) becomes (even cos - odd sin, even sin + odd cos); see Su et al. 2021, arXiv:2104.09864.
    """
    shape = (len(x), *[1] * (x.dim() - 2), -1)
    cos, sin = cos.view(shape), sin.view(shape)
    kept, rotated = x[..., : -2 * cos.shape[-1]], x[..., -2 * cos.shape[-1] :]
    even, odd = rotated[..., ::2], rotated[..., 1::2]
    pairs = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return torch.cat([kept, pairs.flatten(-2)], dim=-1)


class HyperConnection:
    """Manifold-constrained hyper-connections (Xie et al., arXiv:2512.24880) around attention, MoE or the output layer.

    The coefficients of n streams are fn rms(streams), split into pre [n], post [n] and comb [n, n].
    """

    def __init__(self, weights: TorchWeights, prefix: str, hyper: HyperConnections, norm_eps: float) -> None:
        self.fn = Linear(weights.lend(f"{prefix}_fn", dtype=torch.float32))
        self.base, self.scale = vector(weights, f"{prefix}_base"), vector(weights, f"{prefix}_scale")
        self.hyper, self.norm_eps = hyper, norm_eps

    def _mix(self, h: Tensor) -> Tensor:
        return self.fn(rms_norm(h.flatten(1), None, self.norm_eps))

    def pre(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sublayer's input [t, d], post [t, n] and comb [t, n, n] for streams h [t, n, d].

        The input is the sum of the streams, weighted by pre. Sinkhorn iteration makes comb doubly stochastic.
        """
        n, eps = self.hyper.streams, self.hyper.eps
        pre, post, comb = self._mix(h).split([n, n, n * n], dim=1)
        pre = steady(torch.sigmoid, pre * self.scale[0] + self.base[:n]) + eps
        post = 2 * steady(torch.sigmoid, post * self.scale[1] + self.base[n : 2 * n])
        comb = (comb * self.scale[2] + self.base[2 * n :]).view(-1, n, n)
        comb = torch.softmax(comb, dim=2) + eps
        comb = comb / (add_up(comb, 1)[:, None] + eps)
        for _ in range(self.hyper.iterations - 1):
            comb = comb / (add_up(comb, 2)[..., None] + eps)
            comb = comb / (add_up(comb, 1)[:, None] + eps)
        return add_up(pre[..., None] * h, 1), post, comb

    def head(self, h: Tensor) -> Tensor:
        """Reduce the streams after the last layer to [t, d]."""
        pre = steady(torch.sigmoid, self._mix(h) * self.scale + self.base) + self.hyper.eps
        return add_up(pre[..., None] * h, 1)


def hyper_connection_post(h: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Update the streams: h'_k = post_k y + sum over j of comb[j, k] h_j, for h [t, n, d] and y [t, d]."""
    kept = add_up(comb[..., None] * h[:, :, None], 1)
    return kept + post[..., None] * y[:, None]


def clamped_mlp(weights: TorchWeights, prefix: str, limit: float, inner: range, outputs: range) -> GatedMLP:
    """Load outputs `inner` of gate and up, and `outputs` of down."""
    gate, up = (matrix(weights, f"{prefix}.{name}", outputs=inner) for name in ("w1", "w3"))
    return GatedMLP(gate, up, matrix(weights, f"{prefix}.w2", outputs=outputs), limit=limit)


class DeepseekV4MoE:
    """MoE with a shared expert. Routed experts are selected by score, or by token id in hash layers.

    In both cases, scores are their weights. Ranks also split the outputs of the router.
    """

    def __init__(self, model: DeepseekV4Config, weights: TorchWeights, layer: int, comm: TorchCollectives) -> None:
        prefix, rank = f"{model.prefix(layer)}ffn.", comm.rank
        self.sizes, self._comm = model.experts, comm
        limit, inner, hidden = self.sizes.limit, self.sizes.intermediate_size, model.hidden_size
        own = rank.columns(self.sizes.count, _ROUTER_UNIT)
        self.router = matrix(weights, f"{prefix}gate", dtype=torch.float32, outputs=own)
        self.by_id = layer in self.sizes.hash_layers
        if self.by_id:
            name = f"{prefix}gate.tid2eid"
            self.selection = weights.read(name, dtype=torch.int64)
            require_ids(name, int(self.selection.min()), int(self.selection.max()), self.sizes.count)
        else:
            self.selection = vector(weights, f"{prefix}gate.bias")
        outputs = (rank.expert_columns(inner, GATE_HALF), rank.expert_columns(hidden))
        experts = {
            e: clamped_mlp(weights, f"{prefix}experts.{e}", limit, *outputs) for e in rank.experts(self.sizes.count)
        }
        self.experts = SplitExperts(experts, comm, self.sizes.count, inner, hidden)
        outputs = (rank.columns(inner, GATE_HALF), rank.columns(hidden))
        shared = clamped_mlp(weights, f"{prefix}shared_experts", limit, *outputs)
        self.shared = SplitMLP(shared, comm, inner, hidden)

    def __call__(self, x: Tensor, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute float32 [t, hidden] to [t, hidden]; experts compute in `dtype`."""
        weights, topk_ids = self._route(x, token_ids)
        rounded = x.to(dtype)
        return self.experts(rounded, weights, topk_ids) + self.shared(rounded)

    def _route(self, x: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return expert weights, float32, and top-k ids, int64, [t, per_token]. Ties go to the lower expert."""
        logits = self._comm.columns(self.router(x), self.sizes.count, _ROUTER_UNIT)
        scores = steady(lambda piece: F.softplus(piece).sqrt(), logits)
        if self.by_id:
            topk_ids = self.selection.index_select(0, token_ids)
        else:
            order = torch.sort(scores + self.selection, dim=1, descending=True, stable=True).indices
            topk_ids = order[:, : self.sizes.per_token]
        weights = scores.gather(1, topk_ids)
        return weights / (add_up(weights, 1)[:, None] + SMALLEST_SUM) * self.sizes.scale, topk_ids
