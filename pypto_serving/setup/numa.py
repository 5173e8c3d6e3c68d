"""Read the NUMA nodes of this machine that this process may use, and place ranks on them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from pypto_serving.parallel.placement import NumaNode, Placement
from pypto_serving.parallel.topology import part

NODES = "sys/devices/system/node"


def read_nodes(allowed: Collection[int], root: Path = Path("/")) -> tuple[NumaNode, ...]:
    """List the nodes whose memory this process may use, each with those of its CPUs that are `allowed`.

    CPUs of a node without such memory count with the nearest that has some. Nodes without CPUs are left out. Where
    the system tells of no nodes, all CPUs are of node 0. See
    https://docs.kernel.org/admin-guide/mm/numaperf.html and Documentation/ABI/stable/sysfs-devices-node.
    """
    folder = root / NODES
    online = list(_ids(_read(folder / "online")))
    usable = _intersection(online, _read(folder / "has_memory"), _allowed_memory(root))
    cpus: dict[int, list[int]] = {node: [] for node in usable}
    for place, node in enumerate(online):
        home = node if node in cpus else _nearest(folder, online, place, usable)
        if home is not None:
            cpus[home] += [cpu for cpu in _ids(_read(folder / f"node{node}/cpulist")) if cpu in allowed]
    nodes = tuple(NumaNode(node, tuple(sorted(own))) for node, own in cpus.items() if own)
    return nodes or (NumaNode(0, tuple(sorted(allowed))),)


def _intersection(nodes: Sequence[int], *lists: str) -> list[int]:
    """Keep the nodes that are in all lists, where a list that is missing holds all."""
    return [node for node in nodes if all(not text.strip() or node in set(_ids(text)) for text in lists)]


def _allowed_memory(root: Path) -> str:
    """Return the list of nodes whose memory the process's cpuset allows."""
    for line in _read(root / "proc/self/status").splitlines():
        name, _, value = line.partition(":")
        if name == "Mems_allowed_list":
            return value
    return ""


def _nearest(folder: Path, online: Sequence[int], place: int, usable: Collection[int]) -> int | None:
    """Return the node of `usable` nearest to the one at `place` among those online; its file lists all distances."""
    distances = _read(folder / f"node{online[place]}/distance").split()
    known = dict(zip(online, map(int, filter(str.isdigit, distances)), strict=False))
    return min(usable, key=lambda node: (known.get(node, len(online) << 8), node), default=None)


def _ids(text: str) -> Iterator[int]:
    """Yield the numbers of a list such as `0-3,8`; parts that are none are skipped."""
    for item in text.strip().split(","):
        first, _, last = item.partition("-")
        if first.isdigit() and (last or first).isdigit():
            yield from range(int(first), int(last or first) + 1)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


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
