"""Choose the topology: the ranks that the user asked for, if model, backend and kernels can have them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pypto_serving.backend.defaults import BackendDefaults
from pypto_serving.errors import ConfigError
from pypto_serving.parallel.topology import ModelParts, Placement, Topology, place_ranks
from pypto_serving.setup.host import HostFacts
from pypto_serving.setup.kernels import why_torch
from pypto_serving.setup.options import Options
from pypto_serving.setup.settings import Settings
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
"""The dimensions in which torch programs have ranks."""
_COUNTED = {"tensor": "ranks that split a layer", "pipeline": "pipeline stages", "expert": "expert groups"}


def choose_topology(
    settings: Settings, model: ModelSpec, host: HostFacts, backend: BackendDefaults, kernels: str
) -> Topology:
    """Choose the sizes of all dimensions. Raises ConfigError for one that cannot be, with the nearest that can."""
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
    """Return how many hosts the ranks are on. Raises ConfigError for one rank, several replicas, or no secret."""
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
    """Return how many data-parallel ranks share the experts of one replica, and the rows of its attention."""
    has_experts = (options.expert_parallel_size or 1) > 1 and options.tensor_parallel_size in (None, 1)
    return options.data_parallel_size or 1 if has_experts else 1


def _obstacle(options: Options, dimension: str, model: ModelSpec, backend: BackendDefaults, kernels: str) -> str:
    """Say why there can be one of `dimension` only; empty if there can be more."""
    if dimension not in backend.splits or model.parts is None:
        return f"this backend has no {_COUNTED[dimension]}"
    return _torch_obstacle(options, model) if kernels == "torch" and dimension not in TORCH_SPLITS else ""


def _torch_obstacle(options: Options, model: ModelSpec) -> str:
    chosen = f"{options.label('kernels')} is torch" if options.kernels == "torch" else "this installation has no others"
    return f"torch has tensor and expert parallelism on one host only, and {why_torch(options, model) or chosen}"


def _check_torch(options: Options, model: ModelSpec, option: str, value: object, kernels: str) -> None:
    """Raise ConfigError for an option that torch does not have."""
    if kernels == "torch":
        raise ConfigError(f"{options.label(option)} is {value}, but {_torch_obstacle(options, model)}; drop it")


def _check_devices(options: Options, size: int, num_kv_heads: int) -> None:
    """Raise ConfigError where devices would have different numbers of KV heads: they run the same program."""
    if num_kv_heads % size:
        ways = [str(each) for each in range(1, num_kv_heads + 1) if num_kv_heads % each == 0]
        label, heads = options.label(OPTIONS["tensor"]), counted(num_kv_heads, "KV head")
        raise ConfigError(
            f"{label} is {size}, but devices have equal shares of the model's {heads}; give {one_of(ways)}"
        )


def _size(
    settings: Settings, dimension: str, parts: ModelParts | None, host: HostFacts, obstacle: str, devices: bool
) -> int:
    """Choose the size of one dimension, and check it by itself."""
    options, option = settings.options, OPTIONS[dimension]
    if getattr(options, option) == "auto":
        if devices and not obstacle:
            obstacle = "how many devices there are must be given"
        most = 1 if obstacle or parts is None else min(max(1, len(host.nodes)), parts.num_heads)
        reason = obstacle or "one for each NUMA node that has memory and CPUs for this process"
        settings.record(option, most, f"{options.origin(option)}: {reason}")
        return most
    size: int = settings.pick_fixed(option)
    if size == 1:
        return size
    label = options.label(option)
    if obstacle or parts is None:
        raise ConfigError(f"{label} is {size}, but {obstacle}; drop it")
    most, what = _most(dimension, parts)
    if not most:
        raise ConfigError(f"{label} is {size}, but the model has no {what}s; drop it")
    if size > most:
        raise ConfigError(f"{label} is {size}, but the model has {counted(most, what)}; give at most {most}")
    return size


def _most(dimension: str, parts: ModelParts) -> tuple[int, str]:
    """Return the largest size that the model allows, and what it counts."""
    sizes = {
        "tensor": (parts.num_heads, "query head"),
        "pipeline": (parts.num_layers, "layer"),
        "expert": (parts.num_experts, "expert"),
    }
    return sizes[dimension]


def _uneven_groups(
    options: Options, split_by: str, sizes: Mapping[str, int], num_experts: int, kernels: str
) -> ConfigError:
    """Make the error for expert groups that cannot be equal; the option `split_by` gave the tensor ranks."""
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
    """Place the ranks of all replicas on the machine's NUMA nodes; one rank alone may run anywhere.

    A host that joins places its own.
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
