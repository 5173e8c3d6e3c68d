"""MLPs and mixtures of experts (MoE) of torch programs, of which ranks have some of the outputs, or of the experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from pypto_serving.kernels.constants import GATE_HALF
from pypto_serving.model.collectives import TorchCollectives
from pypto_serving.model.layers import Linear


class MLP(Protocol):
    """Two layers, of which a rank may have some of the outputs each."""

    down: Linear

    def inner(self, x: Tensor) -> Tensor:
        """Compute the rank's part of the inner layer, [n, hidden] to [n, own]."""

    def linears(self) -> list[Linear]:
        """List its matrices."""


class GatedMLP:
    """SwiGLU MLP: down(silu(gate(x)) * up(x)), Shazeer 2020, arXiv:2002.05202."""

    def __init__(self, gate: Linear, up: Linear, down: Linear) -> None:
        self.gate, self.up, self.down = gate, up, down

    def inner(self, x: Tensor) -> Tensor:
        """Compute silu(gate(x)) * up(x), [n, hidden] to [n, own]."""
        return self.up.times(x, self.gate.silu(x))

    def linears(self) -> list[Linear]:
        return [self.gate, self.up, self.down]


class SplitMLP:
    """An MLP whose layers, of `inner` and `hidden` outputs, are split over ranks."""

    def __init__(self, mlp: MLP, comm: TorchCollectives, inner: int, hidden: int) -> None:
        self._mlp, self._comm, self._inner, self._hidden = mlp, comm, inner, hidden
        self.linears = mlp.linears

    def __call__(self, x: Tensor) -> Tensor:
        """Compute [n, hidden] to [n, hidden]."""
        inner = self._comm.columns(self._mlp.inner(x), self._inner, GATE_HALF)
        return self._comm.columns(self._mlp.down(inner), self._hidden)


class SplitExperts:
    """The experts of a layer that this rank computes, or shares with others, by their indices among `count`."""

    def __init__(self, experts: Mapping[int, MLP], comm: TorchCollectives, count: int, inner: int, hidden: int) -> None:
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
        """Write what the rank's experts make of their rows to `outputs` [n * k, own columns]."""
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

    def _chosen(self, topk_ids: Tensor) -> list[tuple[MLP, Tensor]]:
        """List the rank's experts that rows have chosen, with the places of these choices in `topk_ids`, flat."""
        flat = topk_ids.flatten()
        counts = torch.bincount(flat, minlength=self._count).tolist()
        places = flat.argsort(stable=True).split(counts)
        return [(expert, places[index]) for index, expert in self._experts.items() if counts[index]]

    def linears(self) -> list[Linear]:
        return [linear for expert in self._experts.values() for linear in expert.linears()]


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

    def linears(self) -> list[Linear]:
        return [self.router, *self.experts.linears()]
