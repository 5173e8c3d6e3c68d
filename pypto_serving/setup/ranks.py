"""Choose the topology: the ranks that the user asks for, if model, backend and kernels support them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from pypto_serving.backend.defaults import BackendDefaults
from pypto_serving.errors import ConfigError
from pypto_serving.parallel.topology import ModelParts, Placement, Rank, Topology, place_ranks
from pypto_serving.setup.compute import why_torch
from pypto_serving.setup.host import HostFacts
from pypto_serving.setup.kv_shares import GroupPlan, MemoryPlan
from pypto_serving.setup.options import Options, Settings
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.kv import KVCacheGroupSpec
from pypto_serving.types.model import ModelSpec
from pypto_serving.types.start import SECRET_VARIABLE, read_secret
from pypto_serving.util import counted, one_of

OPTIONS: Mapping[str, str] = {
    "tensor": "tensor_parallel_size",
    "pipeline": "pipeline_parallel_size",
    "expert": "expert_parallel_size",
}
"""The option for each dimension of a topology."""
TORCH_SPLITS = ("tensor", "expert")
"""The dimensions in which torch programs can have ranks."""
_COUNTED = {"tensor": "ranks that split a layer", "pipeline": "pipeline stages", "expert": "expert groups"}


def choose_topology(
    settings: Settings, model: ModelSpec, host: HostFacts, backend: BackendDefaults, kernels: str
) -> Topology:
    """Choose the sizes of all dimensions. Raises ConfigError for an impossible size, with the nearest possible one."""
    sizes = {}
    for dimension in OPTIONS:
        obstacle = _obstacle(settings.options, dimension, model, backend, kernels)
        sizes[dimension] = _size(settings, dimension, model.parts, host, obstacle, backend.devices)
    if backend.devices and model.parts is not None:
        _check_devices(settings.options, sizes["tensor"], model.parts.num_kv_heads)
    split_by = "tensor_parallel_size"
    if (shares := num_row_shares(settings.options)) > 1:
        split_by = "data_parallel_size"
        sizes["tensor"] = sizes["data"] = shares
        _check_torch(settings.options, model, split_by, shares, kernels)
    if sizes["tensor"] % sizes["expert"]:
        assert model.parts is not None
        raise _uneven_groups(settings.options, split_by, sizes, model.parts.num_experts, kernels)
    hosts = choose_hosts(settings, sizes["tensor"] * sizes["pipeline"])
    if hosts > 1:
        _check_torch(settings.options, model, "join_address", settings.options.join_address, kernels)
    return Topology(**sizes, hosts=hosts)


def choose_hosts(settings: Settings, num_ranks: int) -> int:
    """Return the number of hosts. Two need several ranks, one replica and a secret, else ConfigError is raised."""
    options = settings.options
    address, file = settings.pick_fixed("join_address"), options.join_secret_file or ""
    settings.record("join_secret_file", file or SECRET_VARIABLE, settings.origin_or("join_secret_file", "default"))
    if not address:
        if file:
            raise ConfigError(f"{options.label('join_secret_file')} has no effect without join-address; drop it")
        return 1
    label = options.label("join_address")
    if (size := options.data_parallel_size or 1) != settings.defaults["data_parallel_size"]:
        replicas = options.label("data_parallel_size", beside="join_address")
        over_two = one_of([options.giving(OPTIONS[name], 2, beside="join_address") for name in ("tensor", "pipeline")])
        raise ConfigError(
            f"{label} is {address}, but {replicas} is {size}, and that is for one host; give {over_two} instead, which "
            f"two hosts can share, or drop {label}"
        )
    if num_ranks == 1:
        more = options.giving(OPTIONS["tensor"], 2, beside="join_address")
        raise ConfigError(f"{label} is {address}, but one rank runs on one host; give {more}, or drop it")
    read_secret(file)
    return 2


def num_row_shares(options: Options) -> int:
    """Return the number of data-parallel ranks that share the experts, and the attention rows, of one replica."""
    has_experts = (options.expert_parallel_size or 1) > 1 and options.tensor_parallel_size in (None, 1)
    return options.data_parallel_size or 1 if has_experts else 1


def _obstacle(options: Options, dimension: str, model: ModelSpec, backend: BackendDefaults, kernels: str) -> str:
    """Return why the size of `dimension` must be 1, or ""."""
    if dimension not in backend.splits or model.parts is None:
        return f"this backend has no {_COUNTED[dimension]}"
    return _torch_obstacle(options, model) if kernels == "torch" and dimension not in TORCH_SPLITS else ""


def _torch_obstacle(options: Options, model: ModelSpec) -> str:
    chosen = f"{options.label('kernels')} is torch" if options.kernels == "torch" else "this installation has no others"
    return f"torch has tensor and expert parallelism on one host only, and {why_torch(options, model) or chosen}"


def _check_torch(options: Options, model: ModelSpec, option: str, value: object, kernels: str) -> None:
    """Raise ConfigError for an option that torch does not support."""
    if kernels == "torch":
        raise ConfigError(f"{options.label(option)} is {value}, but {_torch_obstacle(options, model)}; drop it")


def _check_devices(options: Options, size: int, num_kv_heads: int) -> None:
    """Raise ConfigError if devices, which run the same program, would have different numbers of KV heads."""
    if num_kv_heads % size:
        ways = [str(each) for each in range(1, num_kv_heads + 1) if num_kv_heads % each == 0]
        problem = f"but devices have equal shares of the model's {counted(num_kv_heads, 'KV head')}"
        raise options.refusal(OPTIONS["tensor"], f"is {size}, {problem}; give {one_of(ways)}")


def _size(
    settings: Settings, dimension: str, parts: ModelParts | None, host: HostFacts, obstacle: str, devices: bool
) -> int:
    """Choose the size of one dimension, and check it independently of the others."""
    options, option = settings.options, OPTIONS[dimension]
    if getattr(options, option) == "auto":
        if devices and not obstacle:
            obstacle = "how many devices there are must be given"
        chosen = 1 if obstacle or parts is None else min(max(1, len(host.nodes)), parts.num_heads)
        reason = obstacle or "one for each NUMA node that has memory and CPUs for this process"
        settings.record(option, chosen, f"{options.origin(option)}: {reason}")
        return chosen
    size: int = settings.pick_fixed(option)
    if size == 1:
        return size
    label = options.label(option)
    if obstacle or parts is None:
        raise ConfigError(f"{label} is {size}, but {obstacle}; drop it")
    largest, what = {
        "tensor": (parts.num_heads, "query head"),
        "pipeline": (parts.num_layers, "layer"),
        "expert": (parts.num_experts, "expert"),
    }[dimension]
    if not largest:
        raise ConfigError(f"{label} is {size}, but the model has no {what}s; drop it")
    if size > largest:
        raise ConfigError(f"{label} is {size}, but the model has {counted(largest, what)}; give at most {largest}")
    return size


def _uneven_groups(
    options: Options, split_by: str, sizes: Mapping[str, int], num_experts: int, kernels: str
) -> ConfigError:
    """Make the error for unequal expert groups; the option `split_by` set the number of tensor ranks."""
    label, ranks = options.label(OPTIONS["expert"]), options.label(split_by, beside=OPTIONS["expert"])
    tensor, expert = sizes["tensor"], sizes["expert"]
    ways = [str(size) for size in range(2, min(tensor, num_experts) + 1) if tensor % size == 0]
    splits = [split_by]
    if tensor == 1 and options.tensor_parallel_size != "auto" and kernels != "torch":
        splits.append("data_parallel_size")
    ways += [options.giving(each, math.lcm(tensor, expert), beside=OPTIONS["expert"]) for each in splits]
    return ConfigError(
        f"{label} is {expert}, but expert groups are equal parts of the ranks that split a layer, and {ranks} is "
        f"{tensor}; give {one_of(ways)}"
    )


def choose_placements(
    settings: Settings, topology: Topology, replicas: int, host: HostFacts, num_threads: int
) -> tuple[Placement, ...]:
    """Place the ranks of all replicas on the machine's NUMA nodes; a single rank may run anywhere.

    A joining host places its own ranks.
    """
    num_ranks = len(topology.on_host(0)) * replicas
    if topology.num_ranks * replicas == 1:
        return ()
    if num_ranks > host.num_cpus:
        settings.warnings.append(
            f"{num_ranks} ranks have {counted(host.num_cpus, 'CPU')}: those that share one wait for each other"
        )
    elsewhere = topology.num_ranks * replicas - num_ranks
    return place_ranks(host.nodes, num_ranks, num_threads) + (Placement(),) * elsewhere


Span = tuple[int, int]
"""A half-open interval."""

RANK_BYTES, LEADER_BYTES, TORCH_RANK_BYTES = 29 << 20, 31 << 20, 245 << 20
"""Resident memory of a rank's process, apart from weights, KV, activations and logits."""
TORCH_LOGITS, TORCH_LEADER_LOGITS = 6.0, 9.5
"""Memory that a torch process keeps for logits, in multiples of all logits of a step."""


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's work, placement and memory.

    columns: columns of the residual stream; other matrices are split in the same proportion.
    rows: number of ranks that share the rows of attention.
    experts: empty for a model without experts.
    workspace_bytes: for this rank's process; the rest of the plan's workspace is for the server's other processes.
    scoring_bytes: additional part of the plan's workspace that the process takes once prompt tokens have been scored.
        In a pipeline, also once all requests have sampled in one step instead of in one step per stage.
    cpus, node: see Placement; a joining host, `host` 1, chooses its own.
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
    """The memory of ranks apart from weights and KV.

    activation_bytes, logits_bytes: for one step, with logits of sampling tokens; scored_bytes: logits of scored prompt
        tokens.
    position_bytes: tables for all positions; row_bytes: tokens and block tables of all rows, only in the leader.
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
        """Estimate the workspace of a rank before any prompt tokens are scored."""
        logits = int(self.logits_bytes * self._logits_held(rank))
        if self.torch:
            process = TORCH_RANK_BYTES + self.activation_bytes
        else:
            process = LEADER_BYTES if rank.leads else RANK_BYTES
            process += self.step_tokens * parts.token.held(rank, self.slots)
        return process + logits + self.position_bytes + (self.row_bytes if rank.leads else 0)

    def scoring_bytes(self, rank: Rank) -> int:
        """Return the additional workspace of a rank once prompt tokens are scored."""
        return int(self.scored_bytes * self._logits_held(rank))

    def _logits_held(self, rank: Rank) -> float:
        """Return the memory of a rank for logits, in multiples of all logits of a step.

        Each rank of the last stage computes a part, and the leader reads it. In a pipeline, there is one copy per step
        in flight. Memory shared by two processes counts half for each.
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
    """Return the share of memory used by two ranks that counts for `rank`."""
    return 0.5 if rank != other and rank.host == other.host else 1.0


def plan_ranks(
    engine: EngineConfig, model: ModelSpec, memory: MemoryPlan, workspace: RankWorkspace
) -> tuple[RankPlan, ...]:
    """Return the plan of each rank, or () if there is only one."""
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
    """Return the bytes of a group's blocks that belong to the layers of the rank's stage."""
    own = set(rank.layers(parts.num_layers))
    rows = [(tensor.row_bytes / tensor.ratio, set(tensor.layers)) for tensor in spec.tensors]
    if rank.projects:
        own |= {layer for _, have in rows for layer in have if layer >= parts.num_layers}  # draft layers
    return plan.total_bytes * sum(s * len(have & own) for s, have in rows) / sum(s * len(have) for s, have in rows)
