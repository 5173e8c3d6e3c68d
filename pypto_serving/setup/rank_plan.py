"""The memory of each rank, as parts of the memory plan."""

from __future__ import annotations

import msgspec

from pypto_serving.parallel.topology import Rank
from pypto_serving.parallel.weights import ModelParts
from pypto_serving.setup.kv_shares import GroupPlan, MemoryPlan
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.kv import KVCacheGroupSpec
from pypto_serving.types.model import ModelSpec

Span = tuple[int, int]
"""A half-open interval."""

FOLLOWER_BYTES, TORCH_FOLLOWER_BYTES = 40 << 20, 210 << 20
"""Resident memory of the process of a rank that follows, beside weights, KV and activations."""
REPEATED_PART = 8
"""Each rank that follows repeats one of so many parts of the activations in buffers of its own; in torch all of them.
"""


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank computes, where, and its bytes.

    columns: of the residual stream; other matrices are split alike.
    rows: how many ranks share the rows of attention.
    experts: empty for a model without.
    workspace_bytes: of this rank's process; the rest of the plan's workspace is for the other processes of the server.
    cpus, node: see Placement; a host that joins, `host` 1, chooses its own.
    """

    index: int
    host: int
    stage: int
    layers: Span
    rows: int
    heads: Span
    kv_heads: Span
    columns: Span
    experts: Span
    cpus: tuple[int, ...]
    node: int | None
    num_threads: int
    weight_bytes: int
    kv_bytes: int
    workspace_bytes: int


def follower_bytes(kernels: str, activation_bytes: int, position_bytes: int) -> int:
    """Estimate the workspace of a rank that follows, in addition to that of one rank alone."""
    if kernels == "torch":
        return TORCH_FOLLOWER_BYTES + position_bytes + activation_bytes
    return FOLLOWER_BYTES + position_bytes + activation_bytes // REPEATED_PART


def plan_ranks(
    engine: EngineConfig, model: ModelSpec, memory: MemoryPlan, leader: int, follower: int
) -> tuple[RankPlan, ...]:
    """List what each rank has, if there are several; `leader` and `follower` are the workspace of rank 0 and others."""
    topology, parts = engine.topology, model.parts
    if topology.num_ranks == 1 or parts is None:
        return ()
    groups = [*zip(model.kv_groups, memory.groups, strict=True)]
    return tuple(
        RankPlan(
            index=rank.index,
            host=rank.host,
            stage=rank.stage,
            layers=_span(rank.layers(parts.num_layers)),
            rows=topology.data,
            heads=_span(rank.attention.heads(parts.num_heads, parts.num_kv_heads)),
            kv_heads=_span(rank.attention.kv_heads(parts.num_heads, parts.num_kv_heads)),
            columns=_span(rank.columns(parts.hidden_size)),
            experts=_span(rank.experts(parts.num_experts)),
            cpus=place.cpus,
            node=place.node,
            num_threads=place.num_threads,
            weight_bytes=parts.weight_bytes(rank),
            kv_bytes=int(parts.head_share(rank) * sum(_stage_bytes(rank, parts, *group) for group in groups)),
            workspace_bytes=leader if rank.leads else follower,
        )
        for rank, place in zip(topology.ranks, engine.placements, strict=True)
    )


def _span(part: range) -> Span:
    return part.start, part.stop


def _stage_bytes(rank: Rank, parts: ModelParts, spec: KVCacheGroupSpec, plan: GroupPlan) -> float:
    """Return the bytes of a group's blocks for the layers of the rank's stage."""
    own = set(rank.layers(parts.num_layers))
    rows = [(tensor.row_bytes / tensor.ratio, set(tensor.layers)) for tensor in spec.tensors]
    return plan.total_bytes * sum(s * len(have & own) for s, have in rows) / sum(s * len(have) for s, have in rows)
