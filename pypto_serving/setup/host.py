"""Facts about this machine that limit the configuration: free memory, CPUs, folders on its disks."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib.util
import ipaddress
import os
import resource
import shutil
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from pypto_serving.errors import ConfigError
from pypto_serving.kernels.abi import runnable
from pypto_serving.parallel.topology import NumaNode
from pypto_serving.types.tier import PART_NAME

MIN_FILES, MAX_FILES = 64, 65536
"""Required and largest useful limit of open files, for an engine or a client."""


class DiskFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a folder for KV blocks.

    obstacle: why blocks cannot be stored there, or "".
    disk_bytes, free_bytes: size of the disk, and its free bytes.
    used: the folder already has readable blocks.
    """

    obstacle: str = ""
    disk_bytes: int = 0
    free_bytes: int = 0
    used: bool = False


class CardFacts(msgspec.Struct, frozen=True):
    """An NVIDIA card: its name, the free bytes of its memory, and its compute capability."""

    name: str
    free_bytes: int
    capability: tuple[int, int] = (9, 0)


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about this machine, or about the part of it for each of `num_replicas`.

    available_bytes: memory that can be allocated now without swapping, within a container's limit.
    num_cpus: number of CPUs that can be used at once; nodes: NUMA nodes of all allowed CPUs.
    kernels: instruction sets that both the CPU kernels and this machine support, best first.
    torch, triton, mooncake, pypto, otel (OpenTelemetry): whether they are installed.
    npu: whether Ascend's driver shows a device; cards: those that NVIDIA's driver shows.
    cache_dir: folder for files that may be deleted at any time; "" if the user has none.
    kv_disk: facts about the folder of the disk tier, if configured.
    """

    available_bytes: int
    num_cpus: int
    num_replicas: int = 1
    nodes: tuple[NumaNode, ...] = ()
    kernels: tuple[str, ...] = ()
    torch: bool = True
    triton: bool = True
    mooncake: bool = True
    otel: bool = True
    pypto: bool = False
    npu: bool = False
    cards: tuple[CardFacts, ...] = ()
    cache_dir: str = ""
    kv_disk: DiskFacts | None = None


def raise_file_limit() -> None:
    """Increase this process's soft limit of open files to at most MAX_FILES. Raises ConfigError if it stays too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if wanted < MIN_FILES:
        raise ConfigError(
            f"this process may open {wanted} files, but needs {MIN_FILES}; raise the limit of open files (ulimit -n)"
        )
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def read_host_facts(root: Path = Path("/"), kv_disk: str | None = None, cards: bool = False) -> HostFacts:
    """Read all facts: memory and CPUs from /proc and this process's control groups, and installed packages.

    `root` is for tests; `kv_disk` is the folder of the disk tier, if configured.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return HostFacts(
        available_bytes=_available_bytes(root),
        num_cpus=_num_cpus(len(allowed), root),
        nodes=read_nodes(allowed, root),
        kernels=runnable(),
        otel=_has_otel(),
        npu=any((root / "dev").glob("davinci[0-9]*")),
        cards=read_cards(os.environ.get("CUDA_VISIBLE_DEVICES")) if cards else (),
        cache_dir=read_cache_dir(),
        kv_disk=read_disk_facts(Path(kv_disk)) if kv_disk else None,
        **{name: importlib.util.find_spec(name) is not None for name in ("torch", "triton", "mooncake", "pypto")},
    )


class _CardMemory(ctypes.Structure):
    """`nvmlMemory_t` of NVIDIA's management library."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def read_cards(visible: str | None) -> tuple[CardFacts, ...]:
    """Ask NVIDIA's management library for the cards that `visible` (CUDA_VISIBLE_DEVICES) leaves; none if it fails.

    It opens no card, which would take time and memory. Cards are in the order of the PCI bus. As CUDA does, stop at the
    first entry that names no card. See https://docs.nvidia.com/deploy/nvml-api/.
    """
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ()
    count = ctypes.c_uint()
    if library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return ()
    names = map(str, range(count.value)) if visible is None else map(str.strip, visible.split(","))
    found: list[CardFacts] = []
    for name in names:
        if (card := _read_card(library, name)) is None:
            break
        found.append(card)
    library.nvmlShutdown()
    return tuple(found)


def _read_card(library: ctypes.CDLL, name: str) -> CardFacts | None:
    """Return facts about the card of this index or UUID, None if there is none."""
    card, memory, title = ctypes.c_void_p(), _CardMemory(), ctypes.create_string_buffer(96)
    major, minor = ctypes.c_int(), ctypes.c_int()
    if name.isdigit():
        missing = library.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(card))
    else:
        missing = library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(card))
    if (
        missing
        or library.nvmlDeviceGetMemoryInfo(card, ctypes.byref(memory))
        or library.nvmlDeviceGetName(card, title, len(title))
        or library.nvmlDeviceGetCudaComputeCapability(card, ctypes.byref(major), ctypes.byref(minor))
    ):
        return None
    return CardFacts(title.value.decode(), memory.free, (major.value, minor.value))


def _has_otel() -> bool:
    """Return whether OpenTelemetry's SDK and the exporter of its protocol are installed."""
    try:
        return all(map(importlib.util.find_spec, ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc")))
    except ModuleNotFoundError:  # a parent package is missing
        return False


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable only from this machine. Of names, only localhost counts."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower() == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def read_cache_dir() -> str:
    """Return our folder in the user's cache, or ""."""
    return read_user_dir("XDG_CACHE_HOME", ".cache")


def read_user_dir(variable: str, usual: str) -> str:
    """Return our folder in the one that a variable names, by default `usual` in the home folder, or "".

    See https://specifications.freedesktop.org/basedir-spec/latest/.
    """
    given = Path(os.environ.get(variable, ""))
    try:
        return str((given if given.is_absolute() else Path.home() / usual) / "pypto-serving")
    except RuntimeError:
        return ""


def read_disk_facts(folder: Path) -> DiskFacts:
    """Return facts about `folder`. Create and remove a folder in it, or in its nearest existing parent, as a test."""
    existing, used = folder.absolute(), False
    while not os.path.lexists(existing):
        existing = existing.parent
    try:
        with contextlib.suppress(FileNotFoundError):
            folder.lstat()  # raises if the name is too long
        if existing == folder.absolute():
            parts = [path for path in existing.iterdir() if PART_NAME.fullmatch(path.name)]
            read_only = os.statvfs(existing).f_flag & os.ST_RDONLY
            used = any(read_only or os.access(path, os.W_OK | os.X_OK, effective_ids=True) for path in parts)
        disk = shutil.disk_usage(existing)
        Path(tempfile.mkdtemp(prefix=".pypto-", dir=existing)).rmdir()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return DiskFacts(used=used)
        return DiskFacts(obstacle="" if used else os.strerror(error.errno or 0).lower(), used=used)
    return DiskFacts(disk_bytes=disk.total, free_bytes=disk.free, used=used)


_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Files of limit and use, and the key in memory.stat of reclaimable page cache, for control groups v2, then v1."""


def _control_groups(root: Path, controller: str) -> Iterator[Path]:
    """List the folders of this process's control group and of its parents, v2 or v1, up to the container's root.

    A line of /proc/self/cgroup is `number:controllers:path`; v2 has one line, without controllers.
    """
    top = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        base = top / controller if controllers else top
        own = base / path.strip("/")
        yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(base))


def _available_bytes(root: Path) -> int:
    """Return MemAvailable, or the free bytes under the tightest limit if less; there, page cache counts as free."""
    kib = _keyed_int(root / "proc/meminfo", "MemAvailable:")
    free = kib * 1024 if kib is not None else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for group in _control_groups(root, "memory"):
        for max_name, current_name, cached_key in _MEMORY_FILES:
            limit, current = _int(group / max_name), _int(group / current_name)
            if limit is not None and current is not None:
                cached = _keyed_int(group / "memory.stat", cached_key) or 0
                free = min(free, limit - current + cached)
    return max(0, free)


def _num_cpus(allowed: int, root: Path) -> int:
    """Return the number of CPUs of the tightest quota, from 1 to `allowed`."""
    for group in _control_groups(root, "cpu"):
        v2, v1 = group / "cpu.max", (group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us")
        quota, _, period = (_read(v2) or " ".join(map(_read, v1))).strip().partition(" ")
        if quota.strip().isdigit() and period.strip().isdigit():
            allowed = min(allowed, int(quota) // int(period))
    return max(1, allowed)


def _int(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _keyed(path: Path, key: str) -> str:
    """Return the first word after a key at the beginning of a line, or ""."""
    lines = map(str.split, _read(path).splitlines())
    return next((words[1] for words in lines if len(words) > 1 and words[0] == key), "")


def _keyed_int(path: Path, key: str) -> int | None:
    text = _keyed(path, key)
    return int(text) if text.isdigit() else None


NODES = "sys/devices/system/node"


def read_nodes(allowed: Collection[int], root: Path = Path("/")) -> tuple[NumaNode, ...]:
    """Return the nodes whose memory this process may use, each with its `allowed` CPUs.

    CPUs of a node without such memory count to the nearest node that has some. Nodes without CPUs are omitted. If the
    system reports no nodes, all CPUs belong to node 0. See
    https://docs.kernel.org/admin-guide/mm/numaperf.html and Documentation/ABI/stable/sysfs-devices-node.
    """
    folder = root / NODES
    online = list(_ids(_read(folder / "online")))
    allowed_nodes = (_read(folder / "has_memory"), _keyed(root / "proc/self/status", "Mems_allowed_list:"))
    lists = [set(_ids(text)) for text in allowed_nodes if text.strip()]  # a missing list contains all nodes
    usable = [node for node in online if all(node in nodes for nodes in lists)]
    cpus: dict[int, list[int]] = {node: [] for node in usable}
    for place, node in enumerate(online):
        home = node if node in cpus else _nearest(folder, online, place, usable)
        if home is not None:
            cpus[home] += [cpu for cpu in _ids(_read(folder / f"node{node}/cpulist")) if cpu in allowed]
    nodes = tuple(NumaNode(node, tuple(sorted(own))) for node, own in cpus.items() if own)
    return nodes or (NumaNode(0, tuple(sorted(allowed))),)


def _nearest(folder: Path, online: Sequence[int], place: int, usable: Collection[int]) -> int | None:
    """Return the node of `usable` nearest to online[place], whose file lists the distances to all online nodes."""
    distances = _read(folder / f"node{online[place]}/distance").split()
    known = dict(zip(online, map(int, filter(str.isdigit, distances)), strict=False))
    return min(usable, key=lambda node: (known.get(node, len(online) << 8), node), default=None)


def _ids(text: str) -> Iterator[int]:
    """Yield the numbers of a list such as `0-3,8`; skip parts that are not numbers."""
    for item in text.strip().split(","):
        first, _, last = item.partition("-")
        if first.isdigit() and (last or first).isdigit():
            yield from range(int(first), int(last or first) + 1)
