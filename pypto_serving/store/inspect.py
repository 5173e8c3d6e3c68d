"""Inspect, verify and delete folders of blocks for `cli kv`. Servers do not use this module."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pypto_serving.errors import ConfigError
from pypto_serving.store.base import Piece, digest, reason_of
from pypto_serving.store.files import block_files, read_block
from pypto_serving.store.folder import (
    FORMATS,
    FolderUsage,
    Meta,
    Unusable,
    fingerprint_folders,
    open_lock,
    read_meta,
    take_alone,
    usage,
)
from pypto_serving.store.index import RECORD_BYTES, SlotTable
from pypto_serving.store.slab import Slab, stride_of
from pypto_serving.types.arrays import BlockBytes
from pypto_serving.types.tier import ALIGNMENT
from pypto_serving.util import open_regular

Report = Callable[[int, int], None]
"""Called with the number of blocks done so far, and of all blocks."""


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """Blocks of one group. `num_free`: empty slots of its table; None if each block is a file."""

    block_bytes: int
    num_blocks: int
    num_free: int | None


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """A fingerprint's folder. If `meta` is None, it is not usable, because of `problem`."""

    usage: FolderUsage
    meta: Meta | None
    groups: tuple[GroupFacts, ...]
    problem: str = ""


def folders_in(root: Path) -> list[Path]:
    """Return the folders of blocks in a user's folder. Raises ConfigError if the user's folder cannot be read."""
    try:
        return fingerprint_folders(root)
    except OSError as error:
        raise ConfigError(
            f"{root} cannot be read: {reason_of(error)}; give the folder that the option kv-disk names"
        ) from None


def facts(path: Path) -> FolderFacts:
    """Return facts about a folder. Raises OSError."""
    try:
        meta, problem = _read_served(path), "its meta.json is damaged"
    except FileNotFoundError:
        meta, problem = None, "it is not complete"
    except Unusable as error:
        meta, problem = None, str(error)
    if meta is None:
        return FolderFacts(usage(path), None, (), problem)
    if meta.kind == "files":
        counts = [0] * len(meta.block_bytes)
        for _, _, group in block_files(path, len(counts)):
            counts[group] += 1
        groups = tuple(GroupFacts(size, count, None) for size, count in zip(meta.block_bytes, counts, strict=True))
    else:
        groups = tuple(_slot_facts(path, group, size) for group, size in enumerate(meta.block_bytes))
    return FolderFacts(usage(path), meta, groups)


def _read_served(path: Path) -> Meta | None:
    """Like `read_meta`, but raise Unusable also for an earlier format."""
    meta = read_meta(path)
    if meta is not None and meta.format < FORMATS[meta.kind]:
        raise Unusable(
            f"it has format {meta.format}, made by an earlier version; the next server of this model empties it"
        )
    return meta


def _slot_facts(path: Path, group: int, block_bytes: int) -> GroupFacts:
    try:
        table = _open_table(path, group, block_bytes, writable=False)
    except FileNotFoundError:
        return GroupFacts(block_bytes, 0, 0)
    table.close()
    count = len(table.entries().slots)
    return GroupFacts(block_bytes, count, table.num_slots - count)


def _open_table(path: Path, group: int, block_bytes: int, *, writable: bool) -> SlotTable:
    index = path / f"g{group}.index"
    return SlotTable(index, group, block_bytes, index.stat().st_size // RECORD_BYTES, writable=writable)


@dataclass(frozen=True, slots=True)
class Verified:
    """Result of reading `num_blocks`, of which `num_damaged` are damaged; `dropped`: these were removed."""

    num_blocks: int
    num_damaged: int
    dropped: bool


def verify(path: Path, report: Report) -> Verified:
    """Read all blocks of a folder, and drop damaged ones unless a server has it open. Raises OSError, Unusable.

    Raises FileNotFoundError for a folder that is being created or deleted.
    """
    with _kept(path):
        meta = _read_served(path)
        if meta is None:
            raise Unusable("its meta.json is damaged; the next server of this model writes it anew")
        check = _verify_files if meta.kind == "files" else _verify_slots
        num_blocks, damaged = check(path, meta, report)
    dropped = bool(damaged) and _drop(path, damaged)
    return Verified(num_blocks, len(damaged), dropped)


Damaged = list[tuple[int, int, bytes] | Path]
"""(group, slot, key) of slots, or files."""


@contextlib.contextmanager
def _kept(path: Path) -> Iterator[None]:
    """Prevent the deletion of a folder during the block."""
    lock = open_lock(path)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield
    finally:
        os.close(lock)


def _verify_slots(path: Path, meta: Meta, report: Report) -> tuple[int, Damaged]:
    damaged: Damaged = []
    done, total = 0, sum(group.num_blocks for group in facts(path).groups)
    for group, size in enumerate(meta.block_bytes):
        with contextlib.ExitStack() as stack:
            try:
                table = _open_table(path, group, size, writable=False)
            except FileNotFoundError:
                continue
            stack.callback(table.close)
            slab = Slab(path, group, size, table.num_slots, writable=False)
            stack.callback(slab.close)
            memory = _memory(size)
            for slot in table.entries().slots.tolist():
                held = table.get(slot)
                assert held is not None
                if not _is_whole(slab, slot, held, memory) and _still_holds(path, group, size, slot, held):
                    damaged.append((group, slot, held[0]))
                done += 1
                report(done, max(done, total))
    return done, damaged


def _memory(size: int) -> BlockBytes:
    """Return memory aligned for direct I/O."""
    memory = np.empty(stride_of(size) + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]


def _is_whole(slab: Slab, slot: int, held: tuple[bytes, bytes], memory: BlockBytes) -> bool:
    try:
        slab.read(slot, memory)
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.EIO):
            return False
        raise
    return digest(held[0], memory) == held[1]


def _still_holds(path: Path, group: int, size: int, slot: int, held: tuple[bytes, bytes]) -> bool:
    """Return whether the slot still holds this block, since a server may have reused it meanwhile."""
    table = _open_table(path, group, size, writable=False)
    table.close()
    return slot < table.num_slots and table.get(slot) == held


def _verify_files(path: Path, meta: Meta, report: Report) -> tuple[int, Damaged]:
    damaged: Damaged = []
    files = list(block_files(path, len(meta.block_bytes)))
    for done, (file, key, group) in enumerate(files, 1):
        with contextlib.suppress(FileNotFoundError), os.fdopen(open_regular(file), "rb", buffering=0) as opened:
            if not read_block(opened.fileno(), Piece(group, 0, key, _memory(meta.block_bytes[group]))):
                damaged.append(file)
        report(done, len(files))
    return len(files), damaged


def _drop(path: Path, damaged: Damaged) -> bool:
    """Forget damaged blocks; return False if a server has the folder open."""
    lock = take_alone(path)
    if lock is None:
        return False
    try:
        meta = read_meta(path)
        for file in damaged:
            if isinstance(file, Path):
                file.unlink(missing_ok=True)
        for group, size in enumerate(meta.block_bytes if meta and meta.kind == "slots" else ()):
            table = _open_table(path, group, size, writable=True)
            for entry in damaged:
                if not isinstance(entry, Path) and entry[0] == group:
                    held = table.get(entry[1])
                    if held is not None and held[0] == entry[2]:
                        table.drop(entry[1])
            table.flush()
            table.sync()
            table.close()
        return True
    finally:
        os.close(lock)
