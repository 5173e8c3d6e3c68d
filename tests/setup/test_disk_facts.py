"""What a folder on a disk allows is known before anything is loaded, and decides; trying leaves nothing behind."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pypto_serving.errors import ConfigError
from pypto_serving.setup.host import DiskFacts, read_disk_facts
from pypto_serving.setup.resolver import Resolved
from pypto_serving.util import GIB
from tests.setup.small import FULL, HOST, make_resolved
from tests.store.blocks import Disk, as_nobody, key_of, mounted, put


def resolved(disk: DiskFacts, **options: str) -> Resolved:
    return make_resolved(None, msgspec.structs.replace(HOST, kv_disk=disk), kv_disk="/kv", **options)


@pytest.fixture
def locked() -> Iterator[Path]:
    """A folder that this process may read, but not write, until the end of the test."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o555)
        with as_nobody():
            yield folder
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
        facts = read_disk_facts(root)
        assert (facts.obstacle, facts.free_bytes, facts.used) == ("", 0, False)


def test_a_folder_of_blocks_that_cannot_work_is_refused() -> None:
    slots = resolved(DiskFacts(free_bytes=GIB)).engine.cache.tiers[0].num_slots[0]
    needed = FULL.block_bytes + 64 * slots
    assert resolved(DiskFacts(free_bytes=needed)).engine.cache.tiers
    assert resolved(DiskFacts(used=True)).engine.cache.tiers
    with pytest.raises(
        ConfigError, match=r"^--kv-disk is /kv, whose disk has 128 MiB left, .* lower --kv-disk-size, or"
    ):
        resolved(DiskFacts(free_bytes=needed - 1))
    with pytest.raises(
        ConfigError, match=r"^--kv-disk is /kv, which cannot be used: permission denied; give a folder that can"
    ):
        resolved(DiskFacts(free_bytes=GIB, obstacle="permission denied"))


def test_a_disk_that_holds_less_than_was_asked_for_is_named() -> None:
    asked = "--kv-disk-size is 900 TiB, but the disk of /kv has "
    left = DiskFacts(disk_bytes=80 * GIB, free_bytes=50 * GIB)
    assert resolved(left, kv_disk_size="900TiB").warnings == (f"{asked}50 GiB left; blocks are kept until it is full",)
    used = msgspec.structs.replace(left, used=True)
    assert resolved(used, kv_disk_size="900TiB").warnings == (
        f"{asked}80 GiB in all; blocks are kept until it is full",
    )
    assert resolved(left, kv_disk_size="50GiB").warnings == resolved(used, kv_disk_size="60GiB").warnings == ()
