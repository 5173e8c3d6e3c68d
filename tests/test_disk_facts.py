"""What a folder on a disk allows is known before anything is loaded, and trying leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pypto_serving.host import DiskFacts, read_disk_facts
from tests.store.blocks import Disk, key_of, mounted, put

NOBODY = 65534


@pytest.fixture
def locked() -> Iterator[Path]:
    """A folder that this process may read, but not write, until the end of the test."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o555)
        if os.geteuid() == 0:
            os.seteuid(NOBODY)
        yield folder
        if os.getuid() == 0:
            os.seteuid(0)
        folder.chmod(0o700)


@pytest.mark.parametrize("name", ["", "kv", "a/b/kv"])
def test_a_folder_that_can_be_written_or_made(tmp_path: Path, name: str) -> None:
    facts = read_disk_facts(tmp_path / name)
    assert (facts.obstacle, facts.used) == ("", False)
    assert facts.free_bytes > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["file", "file/kv"])
def test_a_file_is_no_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    assert read_disk_facts(tmp_path / name) == DiskFacts(obstacle="not a directory")


@pytest.mark.parametrize("name", ["", "kv", "a/b/kv"])
def test_no_permission(locked: Path, name: str) -> None:
    assert read_disk_facts(locked / name) == DiskFacts(obstacle="permission denied")


def test_a_link_to_nowhere(tmp_path: Path) -> None:
    (tmp_path / "kv").symlink_to(tmp_path / "gone")
    assert read_disk_facts(tmp_path / "kv").obstacle == "no such file or directory"


@pytest.mark.parametrize("used", [False, True])
def test_a_read_only_disk_is_of_use_if_it_holds_blocks(tmp_path: Path, used: bool) -> None:
    with mounted(tmp_path / "kv", "-t", "tmpfs", "tmpfs") as root:
        if used:
            store = Disk(root, []).open()
            assert all(put(store, {(0, 0): key_of("a")}))
            store.close()
        subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
        assert read_disk_facts(root) == DiskFacts(obstacle="" if used else "read-only file system", used=used)


def test_a_full_disk_has_no_room(tmp_path: Path) -> None:
    with mounted(tmp_path / "kv", "-t", "tmpfs", "-o", "size=64k", "tmpfs") as root:
        assert 0 < read_disk_facts(root).free_bytes <= 65536
        with pytest.raises(OSError), (root / "ballast").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        assert read_disk_facts(root) == DiskFacts()
