"""Read facts about a machine from its files and its environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from pypto_serving.errors import ConfigError
from pypto_serving.setup import host
from pypto_serving.setup.host import read_cache_dir, read_host_facts
from tests.setup.small import MIB


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_host_facts_respect_the_tightest_control_group(tmp_path: Path) -> None:
    write(tmp_path / "proc/meminfo", "MemTotal: 999 kB\nMemAvailable:    4096 kB\n")
    write(tmp_path / "proc/self/cgroup", "0::/pod/box\n")
    box = tmp_path / "sys/fs/cgroup/pod/box"
    write(box / "memory.max", "max\n")
    write(box.parent / "memory.max", str(3 * MIB))
    write(box.parent / "memory.current", str(2 * MIB))
    write(box.parent / "memory.stat", f"anon 1\ninactive_file {MIB}\n")
    write(box.parent / "cpu.max", "100000 100000\n")
    facts = read_host_facts(tmp_path)
    assert (facts.available_bytes, facts.num_cpus) == (2 * MIB, 1)


@pytest.mark.parametrize("where", ["docker/box", "docker", ""], ids=["own", "parent", "as seen in a container"])
def test_host_facts_respect_control_groups_v1(tmp_path: Path, where: str) -> None:
    write(tmp_path / "proc/meminfo", "MemTotal: 999 kB\nMemAvailable:    8192 kB\n")
    write(
        tmp_path / "proc/self/cgroup",
        "12:cpu,cpuacct:/docker/box\n9:memory:/docker/box\n1:name=systemd:/docker/box\n0::/docker/box\n",
    )
    write(tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(tmp_path / "sys/fs/cgroup/memory/memory.usage_in_bytes", str(MIB))
    write(tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    write(tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    memory, cpu = tmp_path / "sys/fs/cgroup/memory" / where, tmp_path / "sys/fs/cgroup/cpu" / where
    write(memory / "memory.limit_in_bytes", f"{3 * MIB}\n")
    write(memory / "memory.usage_in_bytes", f"{2 * MIB}\n")
    write(memory / "memory.stat", f"inactive_file 1\ntotal_inactive_file {MIB}\n")
    write(cpu / "cpu.cfs_quota_us", "150000\n")
    write(cpu / "cpu.cfs_period_us", "100000\n")
    facts = read_host_facts(tmp_path)
    assert (facts.available_bytes, facts.num_cpus) == (2 * MIB, 1)


def test_a_group_beside_ours_does_not_count(tmp_path: Path) -> None:
    write(tmp_path / "proc/meminfo", "MemAvailable:    4096 kB\n")
    write(tmp_path / "proc/self/cgroup", "9:memory:/docker/box\nnonsense\n")
    for other in ("memory/docker/other", "docker/box"):
        write(tmp_path / "sys/fs/cgroup" / other / "memory.limit_in_bytes", "1")
        write(tmp_path / "sys/fs/cgroup" / other / "memory.usage_in_bytes", "0")
    assert read_host_facts(tmp_path).available_bytes == 4 * MIB


def test_the_cache_folder_is_where_the_user_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for wanted, folder in (("/var/cache", "/var/cache"), ("", "/home/me/.cache"), ("relative", "/home/me/.cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", wanted)
        assert read_cache_dir() == f"{folder}/pypto-serving"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert read_cache_dir() == "/home/me/.cache/pypto-serving"


def test_host_facts_without_control_groups(tmp_path: Path) -> None:
    write(tmp_path / "proc/meminfo", "MemAvailable:    4096 kB\n")
    facts = read_host_facts(tmp_path)
    assert facts.available_bytes == 4 * MIB
    assert facts.num_cpus >= 1


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [(256, 4096, 4096), (1024, -1, 65536), (1024, 1 << 20, 65536), (64, 64, 64), (-1, -1, -1)],
)
def test_the_limit_of_files_is_raised(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: int) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(host.resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(host.resource, "setrlimit", lambda kind, given: limits.append(given))
    host.raise_file_limit()
    assert limits[-1] == (raised, hard)


def test_too_few_files_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.resource, "getrlimit", lambda kind: (32, 63))
    with pytest.raises(ConfigError, match="may open 63 files, but needs 64"):
        host.raise_file_limit()
