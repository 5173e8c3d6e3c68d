"""Blocks whose content follows from their key, and the conditions a store must survive."""

from __future__ import annotations

import mmap
import os
import resource
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from pypto_serving.store.base import Piece, Store
from pypto_serving.store.disk import DiskStore
from pypto_serving.types.arrays import BlockBytes
from pypto_serving.util import Clock, hash128

FINGERPRINT = b"model, weights, ..."
BLOCK_BYTES = (8192, 1000)
"""One that direct I/O takes as it is, one that it does not."""
NUM_SLOTS = (6, 4)
NOBODY = 65534

Place = tuple[int, int]
"""(group, slot)"""


def key_of(name: object) -> bytes:
    return hash128(str(name).encode())


def content(key: bytes, size: int) -> BlockBytes:
    return np.random.default_rng(int.from_bytes(key, "little")).integers(0, 256, size, np.uint8)


def aligned(size: int) -> BlockBytes:
    """Zeroed memory at the start of a page."""
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


def piece(place: Place, key: bytes, sizes: Sequence[int] = BLOCK_BYTES) -> Piece:
    """A block to store."""
    group, slot = place
    memory = aligned(sizes[group])
    memory[:] = content(key, sizes[group])
    return Piece(group, slot, key, memory)


def blank(place: Place, key: bytes, sizes: Sequence[int] = BLOCK_BYTES) -> Piece:
    """Where a block is to be loaded."""
    return Piece(*place, key, aligned(sizes[place[0]]))


def put(store: Store, held: Mapping[Place, bytes], sizes: Sequence[int] = BLOCK_BYTES) -> list[bool]:
    return store.store([piece(place, key, sizes) for place, key in held.items()])


def loads(store: Store, place: Place, key: bytes, sizes: Sequence[int] = BLOCK_BYTES) -> bool:
    """Whether a block is loaded; fails when it is loaded wrong."""
    wanted = blank(place, key, sizes)
    (loaded,) = store.load([wanted])
    assert not loaded or np.array_equal(wanted.memory, content(key, sizes[place[0]]))
    return loaded


def listed(store: Store) -> dict[Place, bytes]:
    """The inventory, least recently used first."""
    inventory = store.inventory()
    groups = np.frombuffer(inventory.groups, "<i4").tolist()
    slots = np.frombuffer(inventory.slots, "<i4").tolist()
    keys = [inventory.keys[i : i + 16] for i in range(0, len(inventory.keys), 16)]
    return dict(zip(zip(groups, slots, strict=True), keys, strict=True))


def all_load(store: Store, held: Mapping[Place, bytes]) -> bool:
    return all(loads(store, place, key) for place, key in held.items())


@dataclass
class Disk:
    """A folder to open stores in, closed at the end of a test."""

    root: Path
    stores: list[DiskStore]

    def open(
        self,
        num_slots: tuple[int, ...] = NUM_SLOTS,
        size_bytes: int = 1 << 30,
        fingerprint: bytes = FINGERPRINT,
        clock: Clock | None = None,
    ) -> DiskStore:
        store = DiskStore(self.root, fingerprint, BLOCK_BYTES, num_slots, size_bytes, clock=clock)
        self.stores.append(store)
        return store

    def file(self, name: str) -> Path:
        (path,) = self.root.glob(f"*/{name}")
        return path

    def folders(self) -> list[Path]:
        return sorted(path for path in self.root.iterdir() if path.is_dir())


def places(count: int, group: int = 0) -> Iterable[Place]:
    return ((group, slot) for slot in range(count))


@contextmanager
def as_nobody() -> Iterator[None]:
    """Without the rights of root, if this process has them."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@contextmanager
def mounted(point: Path, *options: str) -> Iterator[Path]:
    """A file system of its own; skips the test where it may not be mounted."""
    if shutil.which("mount") is None:
        pytest.skip("no mount: install Debian's package mount")
    point.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *options, str(point)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting takes root: {done.stderr.strip()}")
    try:
        yield point
    finally:
        subprocess.run(["umount", "--lazy", str(point)], check=True)


@contextmanager
def small_disk(kind: str, folder: Path, size: int) -> Iterator[Path]:
    """A folder in which files cannot take more than about `size` bytes; `limit` counts for each file."""
    if kind == "limit":
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield folder
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    elif kind == "tmpfs":
        with mounted(folder / "tmpfs", "-t", "tmpfs", "-o", f"size={size}", "tmpfs") as point:
            yield point
    else:
        if shutil.which("mkfs.ext4") is None:
            pytest.skip("no mkfs.ext4: install Debian's package e2fsprogs")
        image = folder / "image"
        with image.open("wb") as file:
            file.truncate(size)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", str(image)], check=True)
        with mounted(folder / "ext4", "-o", "loop", str(image)) as point:
            yield point
