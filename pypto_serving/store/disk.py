"""DiskStore: blocks in slots of large files on a local disk. They survive a restart.

`store` empties the records of its slots, writes the blocks, waits for the disk, and only then writes the new records.
So after a kill at any time, each record describes a complete block. Every load verifies key and content.
"""

from __future__ import annotations

import errno
import itertools
import logging
import re
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pypto_serving.store.base import FULL, Piece, Store, digest, reason_of
from pypto_serving.store.files import FileStore
from pypto_serving.store.folder import FORMATS, Folder, FolderStore, Meta, make_room
from pypto_serving.store.index import SlotTable
from pypto_serving.store.slab import Slab
from pypto_serving.types.tier import TierInventory
from pypto_serving.util import Clock, counted, format_size

log = logging.getLogger(__name__)

TOUCHED_AT_ONCE = 1024
"""Write the stamps of this many loads together. A kill loses only these stamps."""
_SHARED = re.compile(
    r"nfs\d?|lustre|ceph|gpfs|beegfs|9p|fuse|fuse\..*|cifs|smb3|afs|orangefs|pvfs2|gfs2?|ocfs2|virtiofs|glusterfs|wekafs"
)


def open_disk(
    folder: str | Path,
    fingerprint: bytes,
    block_bytes: tuple[int, ...],
    num_slots: tuple[int, ...],
    size_bytes: int,
    *,
    model: str = "",
    known: bool,
) -> Store:
    """Open the store in `folder`: slots on a local disk; on a file system shared by hosts, one file per block.

    `model`: the model's name, for people. Raises ConfigError if nothing can be stored there; but if the folder is
    `known` to have been used before, the store is empty instead.
    """
    if is_shared(Path(folder)):
        return FileStore(folder, fingerprint, block_bytes, num_slots, model=model, known=known)
    return DiskStore(folder, fingerprint, block_bytes, num_slots, size_bytes, model=model, known=known)


def is_shared(path: Path, mountinfo: str | None = None) -> bool:
    """Return whether the file system of `path`, which need not exist, is shared by hosts; `mountinfo` as in proc(5)."""
    return _SHARED.fullmatch(file_system(path, mountinfo)) is not None


def file_system(path: Path, mountinfo: str | None = None) -> str:
    """Return the type of the file system of `path`, such as `ext4`; "" if unknown."""
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text()
        except OSError:
            return ""
    resolved, best, found = path.resolve(), -1, ""
    for line in mountinfo.splitlines():
        mount, _, source = line.partition(" - ")
        point = Path(_unescape(mount.split()[4]))
        if resolved.is_relative_to(point) and len(point.parts) >= best:  # later mounts cover earlier ones
            best, found = len(point.parts), source.split()[0]
    return found


def _unescape(text: str) -> str:
    """Decode octal escapes, of spaces for example."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


class DiskStore(FolderStore):
    """Owns a fingerprint's folder of slots, or only reads a folder that another process owns.

    Group g has `num_slots[g]` slots of `block_bytes[g]` bytes. This folder and the unused ones beside it take at most
    `size_bytes` together. No method may be called during or after `close`.
    """

    def __init__(
        self,
        folder: str | Path,
        fingerprint: bytes,
        block_bytes: tuple[int, ...],
        num_slots: tuple[int, ...],
        size_bytes: int,
        *,
        model: str = "",
        known: bool = False,
        clock: Clock | None = None,
    ) -> None:
        """Open the folder like `open_disk`."""
        self._block_bytes, self._num_slots, self._size_bytes = block_bytes, num_slots, size_bytes
        self._lock = threading.Lock()
        self._tables: list[SlotTable] = []
        self._slabs: list[Slab] = []
        meta = Meta(FORMATS["slots"], "slots", fingerprint.hex(), block_bytes, model)
        super().__init__(Path(folder), meta, known=known, clock=clock)
        self._stamps = itertools.count(1 + max((table.last_stamp() for table in self._tables), default=0))

    def _open(self, folder: Folder) -> None:
        damaged, writable = 0, folder.writable
        for group, (size, count) in enumerate(zip(self._block_bytes, self._num_slots, strict=True)):
            table = SlotTable(folder.path / f"g{group}.index", group, size, count, writable=writable)
            self._tables.append(table)
            self._slabs.append(Slab(folder.path, group, size, table.num_slots, writable=writable))
            if table.num_slots < count:
                self._faults.say(
                    "index", f"no room for more than the {counted(table.num_slots, 'slot')} of group {group}"
                )
        for table, slab in zip(self._tables, self._slabs, strict=True):
            slots = table.entries().slots
            damaged += table.num_damaged + table.drop_all(slots[slots >= slab.num_held])
        if damaged and writable:
            self._faults.say("damaged", f"{counted(damaged, 'block')} damaged or cut off: forgotten")
        if writable:
            self._make_room(0)

    def inventory(self) -> TierInventory:
        """Return the blocks held, least recently used first; of two slots with one key, only the last used one."""
        with self._lock:
            entries = [table.entries() for table in self._tables]
        if not entries:
            return TierInventory(tier="disk", writable=False, reason=self._faults.reason)
        groups = np.repeat(np.arange(len(entries), dtype="<i4"), [len(e.slots) for e in entries])
        slots = np.concatenate([e.slots for e in entries]).astype("<i4")
        keys = np.concatenate([e.keys for e in entries])
        newest_first = np.argsort(np.concatenate([e.stamps for e in entries]), kind="stable")[::-1]
        _, first = np.unique(keys[newest_first, 0], return_index=True)
        order = newest_first[np.sort(first)][::-1]
        return TierInventory(
            tier="disk",
            groups=groups[order].tobytes(),
            slots=slots[order].tobytes(),
            keys=keys[order].tobytes(),
            writable=self.writable,
            reason=self._faults.reason,
        )

    def store(self, pieces: Sequence[Piece]) -> list[bool]:
        """See `Store`. One thread at a time."""
        if not self._is_there() or not self.writable:
            return [False] * len(pieces)
        try:
            self._empty(pieces)
            stored = [self._write(piece) for piece in pieces]
            self._keep([piece for piece, done in zip(pieces, stored, strict=True) if done])
        except OSError as error:
            self._forget(pieces)
            if self._is_there():
                self._faults.stop_storing(reason_of(error))
            return [False] * len(pieces)
        return stored

    def _empty(self, pieces: Sequence[Piece]) -> None:
        """Empty the slots, also on disk."""
        with self._lock:
            held = {piece.group for piece in pieces if self._tables[piece.group].drop(piece.slot)}
            self._flush()
        for group in held:
            self._tables[group].sync()

    def _write(self, piece: Piece) -> bool:
        """Write one block. Return False if there is no room. Raises OSError for faults that are not transient."""
        try:
            if not self._has_room(piece):
                return False
            self._slabs[piece.group].write(piece.slot, piece.memory)
            return True
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._faults.full(error)
            return False

    def _has_room(self, piece: Piece) -> bool:
        slab = self._slabs[piece.group]
        if piece.slot >= self._tables[piece.group].num_slots:
            return False
        if piece.slot < slab.num_held:
            return True
        if not self._faults.may_try():
            return False
        taken = sum(slab.allocated_bytes for slab in self._slabs)
        growth = slab.growth(piece.slot, self._size_bytes - taken)
        if taken + growth > self._size_bytes:
            self._faults.say("limit", f"the slots take more than {format_size(self._size_bytes)}; some stay empty")
            return False
        self._make_room(growth)
        slab.grow(growth)
        self._faults.found_room()
        return True

    def _make_room(self, growth: int) -> None:
        """Delete unused folders of other models until this one can grow by `growth` bytes."""
        assert self._folder is not None
        taken = sum(slab.allocated_bytes for slab in self._slabs)
        try:
            deleted = make_room(self._root, self._folder.path, taken + growth, self._size_bytes)
        except OSError as error:
            self._faults.say("others", f"unused folders in it cannot be deleted: {reason_of(error)}")
            return
        if deleted:
            log.info("disk tier in %s: deleted %s of unused blocks of other models", self._root, format_size(deleted))

    def _keep(self, pieces: Sequence[Piece]) -> None:
        """Wait until the blocks are on disk, record them, and wait until the records are on disk. Raises OSError."""
        digests = [digest(piece.key, piece.memory) for piece in pieces]
        groups = {piece.group for piece in pieces}
        for group in groups:
            self._slabs[group].sync()
        with self._lock:
            for piece, found in zip(pieces, digests, strict=True):
                self._tables[piece.group].put(piece.slot, piece.key, found, next(self._stamps))
            self._flush()
        for group in groups:
            self._tables[group].sync()

    def _forget(self, pieces: Sequence[Piece]) -> None:
        with self._lock:
            for piece in pieces:
                self._tables[piece.group].drop(piece.slot)

    def _flush(self) -> None:
        for table in self._tables:
            table.flush()

    def load(self, pieces: Sequence[Piece]) -> list[bool]:
        """See `Store`."""
        self._is_there()
        loaded = [self._load(piece) for piece in pieces]
        self._write_stamps(TOUCHED_AT_ONCE)
        return loaded

    def _load(self, piece: Piece) -> bool:
        if not self._tables:
            return False
        table = self._tables[piece.group]
        with self._lock:
            held = table.get(piece.slot)
        if held is None or held[0] != piece.key:
            return False
        try:
            self._slabs[piece.group].read(piece.slot, piece.memory)
        except OSError as error:
            if error.errno != errno.ENODATA:
                self._faults.say(f"read {error.errno}", f"reading failed: {reason_of(error)}")
                return False
        else:
            if digest(piece.key, piece.memory) == held[1]:
                with self._lock:
                    if table.get(piece.slot) == held and self.writable:
                        table.touch(piece.slot, next(self._stamps))
                return True
        self._drop_damaged(piece, held)
        return False

    def _drop_damaged(self, piece: Piece, held: tuple[bytes, bytes]) -> None:
        """Forget a damaged block, unless its slot holds another block meanwhile."""
        with self._lock:
            if self._tables[piece.group].get(piece.slot) != held:
                return
            self._tables[piece.group].drop(piece.slot)
        if self.writable:
            self._faults.say("damaged", "a block is damaged, and is forgotten")

    def _write_stamps(self, min_count: int) -> None:
        """Write the stamps of loads if at least `min_count` are pending; do not wait for the disk."""
        with self._lock:
            if not self.writable or sum(table.num_dirty for table in self._tables) < min_count:
                return
            try:
                self._flush()
            except OSError as error:
                self._faults.stop_storing(reason_of(error))

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Store`. Also finds damaged blocks."""
        with self._lock:
            entries = [table.entries() for table in self._tables]
        held = {key.tobytes() for e in entries for key in e.keys}
        return [key in held for key in keys]

    def clear(self) -> None:
        """See `Store`. Called by the thread that stores."""
        if not self.writable:
            return
        try:
            with self._lock:
                for table in self._tables:
                    table.drop_all(table.entries().slots)
                self._flush()
            for table in self._tables:
                table.sync()
        except OSError as error:
            self._faults.stop_storing(reason_of(error))

    def close(self) -> None:
        """Write the stamps of the last loads, and close the folder."""
        self._write_stamps(1)
        self._close_files()

    def _close_files(self) -> None:
        parts: list[Slab | SlotTable] = [*self._slabs, *self._tables]
        for part in parts:
            part.close()
        self._slabs.clear()
        self._tables.clear()
        super()._close_files()
