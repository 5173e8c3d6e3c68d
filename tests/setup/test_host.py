"""Read facts about a machine from its files and its environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from pypto_serving.setup.host import HostFacts, read_cache_dir, read_host_facts
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
    assert read_host_facts(tmp_path) == HostFacts(available_bytes=2 * MIB, num_cpus=1)


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
