"""Facts about this machine that limit what it can serve: free memory, CPUs, and folders on its disks."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pypto_serving.errors import ConfigError
from pypto_serving.parallel.topology import NumaNode
from pypto_serving.setup.numa import read_nodes
from pypto_serving.types.tier import PART_NAME

MIN_FILES, MAX_FILES = 64, 65536
"""Open files that an engine or a client needs at least, and the most that are of use."""


class DiskFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a folder for KV blocks.

    obstacle: why no block can be kept there; empty if blocks can.
    disk_bytes, free_bytes: size of the disk, and bytes left on it.
    used: the folder has blocks already that can be read.
    """

    obstacle: str = ""
    disk_bytes: int = 0
    free_bytes: int = 0
    used: bool = False


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about this machine, or about the part of it that each of `num_replicas` has.

    available_bytes: memory that can be allocated now without swapping, within a container's limit.
    num_cpus: CPUs that it may use at once; nodes: NUMA nodes of all that it may use.
    kernels: instruction sets that the CPU kernels were built for and this machine runs, best first.
    torch, mooncake, pypto, otel (OpenTelemetry): whether they are installed; npu: whether there is an Ascend device.
    cache_dir: folder for files that may be deleted at any time; empty if the user has none.
    kv_disk: facts about the folder of the disk tier, if one is wanted.
    """

    available_bytes: int
    num_cpus: int
    num_replicas: int = 1
    nodes: tuple[NumaNode, ...] = ()
    kernels: tuple[str, ...] = ()
    torch: bool = True
    mooncake: bool = True
    otel: bool = True
    pypto: bool = False
    npu: bool = False
    cache_dir: str = ""
    kv_disk: DiskFacts | None = None


def raise_file_limit() -> None:
    """Raise this process's soft limit of open files as far as is of use; raise ConfigError if it stays too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if wanted < MIN_FILES:
        raise ConfigError(
            f"this process may open {wanted} files, but needs {MIN_FILES}; raise the limit of open files (ulimit -n)"
        )
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def read_host_facts(root: Path = Path("/")) -> HostFacts:
    """Read memory and CPUs from /proc and the control groups of this process; `root` is for tests."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    nodes = read_nodes(allowed, root)
    return HostFacts(available_bytes=_available_bytes(root), num_cpus=_num_cpus(len(allowed), root), nodes=nodes)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address to listen on; a name other than localhost may be any."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower() == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def has_npu(root: Path = Path("/")) -> bool:
    """Return whether Ascend's driver shows a device; `root` is for tests."""
    return any((root / "dev").glob("davinci[0-9]*"))


def read_cache_dir() -> str:
    """Find our folder in the user's cache, empty for none; see https://specifications.freedesktop.org/basedir-spec/latest/."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if given.is_absolute():
        return str(given / "pypto-serving")
    try:
        return str(Path.home() / ".cache/pypto-serving")
    except RuntimeError:
        return ""


def read_disk_facts(folder: Path) -> DiskFacts:
    """Try to make a folder in `folder`, or `folder` itself, and remove it again."""
    existing, used = folder.absolute(), False
    while not os.path.lexists(existing):
        existing = existing.parent
    try:
        with contextlib.suppress(FileNotFoundError):
            folder.lstat()  # raises for a name that is too long
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
"""Limit, use, and the key in memory.stat of page cache that can be taken back: in control groups v2, then v1."""


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
    """Return MemAvailable, or less under the tightest limit; page cache under a limit counts as free."""
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
    """Count the CPUs of the tightest quota, at least 1, at most those `allowed`."""
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


def _keyed_int(path: Path, key: str) -> int | None:
    for line in _read(path).splitlines():
        fields = line.split()
        if len(fields) >= 2 and fields[0] == key and fields[1].isdigit():
            return int(fields[1])
    return None
