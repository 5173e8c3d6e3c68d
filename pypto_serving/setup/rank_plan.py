"""The memory of each rank, as parts of the memory plan."""

from __future__ import annotations

import msgspec

from pypto_serving.parallel.topology import ModelParts, Rank
from pypto_serving.setup.kv_shares import GroupPlan, MemoryPlan
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.kv import KVCacheGroupSpec
from pypto_serving.types.model import ModelSpec

Span = tuple[int, int]
"""A half-open interval."""

RANK_BYTES, LEADER_BYTES, TORCH_RANK_BYTES = 29 << 20, 31 << 20, 245 << 20
"""Resident memory of the process of a rank, beside weights, KV, activations and logits."""
TORCH_LOGITS, TORCH_LEADER_LOGITS = 6.0, 9.5
"""Copies of all logits that a process of torch keeps memory for."""


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank computes, where, and its bytes.

    columns: of the residual stream; other matrices are split alike.
    rows: how many ranks share the rows of attention.
    experts: empty for a model without.
    workspace_bytes: of this rank's process; the rest of the plan's workspace is for the other processes of the server.
    scoring_bytes: more of the plan's workspace for the process, once tokens of prompts have been scored; in a pipeline,
        also what it takes once all requests have sampled in the same step, not in as many steps as there are stages.
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
    scoring_bytes: int


class RankWorkspace(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of ranks beside weights and KV.

    activation_bytes, logits_bytes: of a step, with logits of tokens that sample; scored_bytes: logits of tokens that
        are scored.
    position_bytes: tables for all positions; row_bytes: tokens and block tables of all rows, which the leader has.
    slots: steps in flight.
    """

    torch: bool
    activation_bytes: int
    logits_bytes: int
    scored_bytes: int
    position_bytes: int
    row_bytes: int
    slots: int
    step_tokens: int

    def num_bytes(self, rank: Rank, parts: ModelParts) -> int:
        """Estimate the workspace of a rank, before any tokens of prompts are scored."""
        logits = int(self.logits_bytes * self._logits_held(rank))
        if self.torch:
            process = TORCH_RANK_BYTES + self.activation_bytes
        else:
            process = LEADER_BYTES if rank.leads else RANK_BYTES
            process += self.step_tokens * parts.token.held(rank, self.slots)
        return process + logits + self.position_bytes + (self.row_bytes if rank.leads else 0)

    def scoring_bytes(self, rank: Rank) -> int:
        """Return how much more it takes once tokens of prompts are scored."""
        return int(self.scored_bytes * self._logits_held(rank))

    def _logits_held(self, rank: Rank) -> float:
        """Return how many times a rank holds all logits of a step.

        Each rank of the last stage computes a part of them, which the leader reads: in a pipeline from a copy for each
        step in flight. What two processes share is half of either.
        """
        if self.torch:
            return TORCH_LEADER_LOGITS if rank.leads else TORCH_LOGITS
        leader, authors = rank.topology.ranks[0], [each for each in rank.topology.ranks if each.projects]
        in_stages = rank.topology.pipeline > 1
        copies = self.slots if in_stages else 1
        read = sum(_share(rank, author) for author in authors) if rank.leads else 0.0
        written = _share(rank, leader) if rank.projects and not rank.leads else 0.0
        return (copies * (read + written) + (in_stages and rank.projects)) / len(authors)


def _share(rank: Rank, other: Rank) -> float:
    """Return how much of a page two ranks use is counted for one of them."""
    return 0.5 if rank != other and rank.host == other.host else 1.0


def plan_ranks(
    engine: EngineConfig, model: ModelSpec, memory: MemoryPlan, workspace: RankWorkspace
) -> tuple[RankPlan, ...]:
    """List what each rank has, if there are several."""
    topology, parts = engine.parallel.topology, model.parts
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
            kv_heads=_span(rank.attention.kv_heads(parts.num_kv_heads)),
            columns=_span(rank.columns(parts.hidden_size)),
            experts=_span(rank.experts(parts.num_experts)),
            cpus=place.cpus,
            node=place.node,
            num_threads=place.num_threads,
            weight_bytes=parts.weight_bytes(rank),
            kv_bytes=int(parts.head_share(rank) * sum(_stage_bytes(rank, parts, *group) for group in groups)),
            workspace_bytes=workspace.num_bytes(rank, parts),
            scoring_bytes=workspace.scoring_bytes(rank),
        )
        for rank, place in zip(topology.ranks, engine.parallel.placements, strict=True)
    )


def _span(part: range) -> Span:
    return part.start, part.stop


def _stage_bytes(rank: Rank, parts: ModelParts, spec: KVCacheGroupSpec, plan: GroupPlan) -> float:
    """Return the bytes of a group's blocks for the layers of the rank's stage."""
    own = set(rank.layers(parts.num_layers))
    rows = [(tensor.row_bytes / tensor.ratio, set(tensor.layers)) for tensor in spec.tensors]
    if rank.projects:
        own |= {layer for _, have in rows for layer in have if layer >= parts.num_layers}  # draft layers
    return plan.total_bytes * sum(s * len(have & own) for s, have in rows) / sum(s * len(have) for s, have in rows)
