"""Where on its machine a rank runs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pypto_serving.parallel.topology import part


class NumaNode(msgspec.Struct, frozen=True):
    """CPUs that this process may use and that share the memory of one NUMA node."""

    index: int
    cpus: tuple[int, ...]


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank runs. Its memory lies on the node of the CPU that first writes to it.

    So no `set_mempolicy` is needed, which most containers forbid; nor does a full node end the process.

    cpus: CPUs of its threads; empty for all that the process may use.
    node: NUMA node of all these CPUs, or None.
    num_threads: threads that compute; 0 for one per CPU.
    """

    cpus: tuple[int, ...] = ()
    node: int | None = None
    num_threads: int = 0


def place_ranks(nodes: Sequence[NumaNode], num_ranks: int, num_threads: int) -> tuple[Placement, ...]:
    """Give each rank CPUs and its part of `num_threads`: at least one thread, at most one for each of its CPUs.

    Each node gets equally many ranks where that is possible; otherwise all CPUs are split in order. Where there are
    fewer CPUs than ranks, ranks share them.
    """
    each, rest = divmod(num_ranks, max(1, len(nodes)))
    if nodes and not rest:
        cpus = [_share(node.cpus, each, index) for node in nodes for index in range(each)]
    else:
        all_cpus = [cpu for node in nodes for cpu in node.cpus]
        cpus = [_share(all_cpus, num_ranks, index) for index in range(num_ranks)]
    threads = [len(part(num_threads, num_ranks, index)) for index in range(num_ranks)]
    return tuple(
        Placement(cpus=own, node=_node_of(nodes, own), num_threads=max(1, min(count, len(own) or count)))
        for own, count in zip(cpus, threads, strict=True)
    )


def _share(cpus: Sequence[int], count: int, index: int) -> tuple[int, ...]:
    """Return part `index` of `count` of the CPUs, or one of them where there are too few."""
    if len(cpus) < count:
        return tuple(cpus[index * len(cpus) // count :][:1])
    own = part(len(cpus), count, index)
    return tuple(cpus[own.start : own.stop])


def _node_of(nodes: Sequence[NumaNode], cpus: Sequence[int]) -> int | None:
    """Return the node that has all `cpus`, or None."""
    return next((node.index for node in nodes if cpus and set(cpus) <= set(node.cpus)), None)
