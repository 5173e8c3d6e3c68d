"""Read the NUMA nodes of this machine that this process may use."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from pypto_serving.parallel.topology import NumaNode

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
