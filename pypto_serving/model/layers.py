"""Batch-invariant layers: a row's result has the same bits whatever other rows are computed with it.

GEMMs use oneDNN with prepacked weights. It accumulates over K in one order if a call has enough rows; `settle_rows`
finds how many (4 on all machines so far), and smaller calls are padded. Everything else is exactly rounded per
element, or reduces over the last dimension of a row. Activations are fused into the GEMMs, because element-wise kernels
compute the tail of a tensor by another formula.

Ranks have some of the outputs of each matrix, or some of the experts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from pypto_serving.kernels.constants import GATE_HALF
from pypto_serving.model.collectives import TorchCollectives

logger = logging.getLogger(__name__)

ROW_FLOORS = (4, 8, 16, 32, 64)
_PROBE_ROWS = 128


def _onednn_serves(weight: Tensor) -> bool:
    dtype = weight.dtype
    if (
        weight.device.type != "cpu"
        or not torch.backends.mkldnn.is_available()
        or not hasattr(torch.ops.mkldnn, "_linear_pointwise")
    ):
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Linear:
    """y = x W^T + b. Owns a copy of W [out, in], packed for oneDNN if it supports the dtype; b is [out].

    Ranks with nothing to compute have no outputs.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.rows = ROW_FLOORS[0]
        self._packed = self.out_features > 0 and _onednn_serves(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, self.rows) if self._packed else weight.clone()
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Compute x W^T + b, [n, in] to [n, out]."""
        return self._product(x, "none")

    def silu(self, x: Tensor) -> Tensor:
        """Compute silu(x W^T + b), [n, in] to [n, out]."""
        return self._product(x, "swish")

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """Compute (x W^T + b) * other, with x [n, in] and other [n, out]."""
        if not self._packed:
            return self(x) * other
        n, x, other = x.shape[0], self._padded(x), self._padded(other)
        product: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, self._weight, self._bias, "mul")
        return product[:n]

    def _product(self, x: Tensor, activation: str) -> Tensor:
        n, x = x.shape[0], self._padded(x)
        if self._packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, activation, [], "")
        else:
            y = F.linear(x, self._weight, self._bias)
            y = F.silu(y) if activation == "swish" else y
        return y[:n]

    def _padded(self, x: Tensor) -> Tensor:
        missing = self.rows - x.shape[0]
        return F.pad(x, (0, 0, 0, missing)) if missing > 0 else x

    def settle_rows(self) -> bool:
        """Choose the smallest of ROW_FLOORS from which on results do not depend on the row count.

        If there is none, keep the largest and return False. The test runs on copies of one row. A second run adds the
        negated rounded result as a bias, to compare the bits that rounding hides.
        """
        generator = torch.Generator().manual_seed(0)
        row = torch.randn(1, self.in_features, generator=generator, device="cpu").to(self._weight.device, self.dtype)
        rounded = self(row.expand(_PROBE_ROWS, -1).contiguous())
        rest = Linear.__new__(Linear)
        rest.__dict__.update(self.__dict__, _bias=-rounded[0])
        for floor in ROW_FLOORS:
            self.rows = rest.rows = floor
            if all(_same_rows(linear, row, floor) for linear in (self, rest)):
                return True
        return False


def _same_rows(linear: Linear, row: Tensor, floor: int) -> bool:
    """Return whether all copies of `row` [1, in] give the same result for every row count."""
    whole = linear(row.expand(_PROBE_ROWS, -1).contiguous())
    counts = (1, floor, floor + 1, 2 * floor - 1, 31, _PROBE_ROWS)
    return all(torch.equal(linear(row.expand(n, -1).contiguous()), whole[:1].expand(n, -1)) for n in counts)


class Embedding:
    """A table of embeddings; each rank has the rows of its tokens."""

    def __init__(self, table: Tensor, comm: TorchCollectives, tokens: range) -> None:
        self.table, self._comm, self._tokens = table, comm, tokens

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Look tokens up, [t] to [t, hidden]."""
        if self._comm.alone:
            return self.table.index_select(0, token_ids)
        found = self.table.new_zeros(len(token_ids), self.table.shape[1])
        own = ((token_ids >= self._tokens.start) & (token_ids < self._tokens.stop)).nonzero().flatten()
        found.index_copy_(0, own, self.table.index_select(0, token_ids[own] - self._tokens.start))
        return self._comm.sum(found)


def linears_in(program: object) -> list[Linear]:
    """List the matrices in a program: in its attributes, and in those of its parts."""
    found, seen, parts = list[Linear](), set[int](), [program]
    while parts:
        part = parts.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, Linear):
            found.append(part)
        elif isinstance(part, Mapping):
            parts += part.values()
        elif isinstance(part, list | tuple):
            parts += part
        elif type(part).__module__.startswith("pypto_serving.model."):
            parts += getattr(part, "__dict__", {}).values()
    return found


def settle_rows(program: object, comm: TorchCollectives, least: int = 1, stable: bool = True) -> int:
    """Settle the rows of each matrix in `program`, and return the largest of all ranks, at least `least`.

    Warn if some result depends on the row count, or if others are not `stable`.
    """
    settled: dict[tuple[int, int, torch.dtype], tuple[int, bool]] = {}
    for linear in linears_in(program):
        shape = (linear.in_features, linear.out_features, linear.dtype)
        if shape not in settled:
            same = linear.settle_rows()
            settled[shape] = (linear.rows, same)
        linear.rows = settled[shape][0]
    if not (stable and all(same for _, same in settled.values())):
        logger.warning("matrix products on this machine depend on the row count: outputs may vary with the batch")
    return comm.largest(max(least, *(rows for rows, _ in settled.values())))


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm over the last dimension, times `weight`, computed in float32: arXiv:1910.07467."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def apply_rope_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE in NeoX style to x [n, heads, d], in place: the pair (i, i + d/2) is rotated by the i-th angle.

    `cos` and `sin` [n, 1, d] hold every angle twice; the first half of `sin` is negated.
    """
    half, rotated = x.shape[-1] // 2, torch.empty_like(x)
    torch.mul(x[..., half:], sin[..., :half], out=rotated[..., :half])
    torch.mul(x[..., :half], sin[..., half:], out=rotated[..., half:])
    return x.mul_(cos).add_(rotated)


class GatedMLP:
    """SwiGLU MLP: down(silu(gate(x)) * up(x)), Shazeer 2020, arXiv:2002.05202. A rank may have a part of its outputs.

    With a `limit`, down(silu(min(gate(x), limit)) * clamp(up(x), -limit, limit)); silu(gate) is clamped at silu(limit),
    which is the same.
    """

    def __init__(self, gate: Linear, up: Linear, down: Linear, *, limit: float | None = None) -> None:
        self.gate, self.up, self.down, self.limit = gate, up, down, limit
        self.silu_limit = None if limit is None else float(F.silu(torch.tensor(limit)))

    def inner(self, x: Tensor) -> Tensor:
        """Compute the rank's part of the input of `down`, [n, hidden] to [n, own]."""
        gated = self.gate.silu(x)
        if self.limit is None:
            return self.up.times(x, gated)
        return gated.clamp(max=self.silu_limit) * self.up(x).clamp(-self.limit, self.limit)


class SplitMLP:
    """An MLP whose layers, of `inner` and `hidden` outputs, are split over ranks."""

    def __init__(self, mlp: GatedMLP, comm: TorchCollectives, inner: int, hidden: int) -> None:
        self._mlp, self._comm, self._inner, self._hidden = mlp, comm, inner, hidden

    def __call__(self, x: Tensor) -> Tensor:
        """Compute [n, hidden] to [n, hidden]."""
        inner = self._comm.columns(self._mlp.inner(x), self._inner, GATE_HALF)
        return self._comm.columns(self._mlp.down(inner), self._hidden)


class SplitExperts:
    """The experts of a layer that this rank computes, or shares with others, by their indices among `count`."""

    def __init__(
        self, experts: Mapping[int, GatedMLP], comm: TorchCollectives, count: int, inner: int, hidden: int
    ) -> None:
        self._experts, self._comm, self._count = experts, comm, count
        self._inner, self._hidden = inner, hidden
        topology = comm.rank.topology
        self._shares_each, self._has_all = topology.tensor > topology.expert, topology.expert == 1

    def __call__(self, x: Tensor, weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Run each row's experts and sum them in top-k order: `weights`, `topk_ids` [n, k] to float32 [n, hidden]."""
        if self._has_all:
            columns = self._comm.rank.columns(self._hidden)
            slots = x.new_empty(topk_ids.numel(), len(columns))
            self._run(x, topk_ids, slots)
            return self._comm.columns(_weighted_sum(slots, weights), self._hidden)
        columns = self._comm.rank.expert_columns(self._hidden)
        slots = x.new_zeros(topk_ids.numel(), self._hidden)
        self._run(x, topk_ids, slots[:, columns.start : columns.stop])
        return _weighted_sum(self._comm.sum(slots), weights)

    def _run(self, x: Tensor, topk_ids: Tensor, outputs: Tensor) -> None:
        """Write the results of the rank's experts for their rows to `outputs` [n * k, own columns]."""
        per_token, chosen = topk_ids.shape[1], self._chosen(topk_ids)
        if not self._shares_each:
            for expert, entries in chosen:
                inner = expert.inner(x.index_select(0, entries // per_token))
                outputs.index_copy_(0, entries, expert.down(inner))
            return
        columns = self._comm.rank.expert_columns(self._inner, GATE_HALF)
        gated = x.new_zeros(len(outputs), len(columns) if self._has_all else self._inner)
        own = gated if self._has_all else gated[:, columns.start : columns.stop]
        for expert, entries in chosen:
            own.index_copy_(0, entries, expert.inner(x.index_select(0, entries // per_token)))
        gated = self._comm.columns(gated, self._inner, GATE_HALF) if self._has_all else self._comm.sum(gated)
        for expert, entries in chosen:
            outputs.index_copy_(0, entries, expert.down(gated.index_select(0, entries)))

    def _chosen(self, topk_ids: Tensor) -> list[tuple[GatedMLP, Tensor]]:
        """Return the chosen experts of the rank, each with the flat indices of its choices in `topk_ids`."""
        flat = topk_ids.flatten()
        counts = torch.bincount(flat, minlength=self._count).tolist()
        places = flat.argsort(stable=True).split(counts)
        return [(expert, places[index]) for index, expert in self._experts.items() if counts[index]]


def _weighted_sum(slots: Tensor, weights: Tensor) -> Tensor:
    """Sum `slots` [n * k, width] by `weights` [n, k], from the first to the last of a row: float32 [n, width]."""
    by_row = slots.view(*weights.shape, slots.shape[1])
    total = by_row[:, 0].float() * weights[:, :1]
    for slot in range(1, weights.shape[1]):
        total += by_row[:, slot].float() * weights[:, slot : slot + 1]
    return total


class TopKMoE:
    """MoE: each row goes to its top `per_token` experts, summed in top-k order. All ranks route all rows."""

    def __init__(self, router: Linear, experts: SplitExperts, per_token: int, normalize: bool) -> None:
        self.router, self.experts = router, experts
        self.per_token, self.normalize = per_token, normalize

    def __call__(self, x: Tensor) -> Tensor:
        """Compute [n, hidden] to [n, hidden]."""
        weights, topk_ids = self._route(x)
        return self.experts(x, weights, topk_ids).to(x.dtype)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return expert weights, float32, and top-k ids, int64, both [n, per_token], most probable first."""
        probabilities = torch.softmax(self.router(x).float(), dim=-1)
        weights, topk_ids = torch.topk(probabilities, self.per_token, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, topk_ids
