"""FileStore: one file per block, on a file system to which several hosts may write. Writers use no lock.

A block's file is <first two digits of its key>/<key>.<group>: a header of magic, key and digest, then the content. It
is renamed to that when it is complete, so files with such a name are complete. Servers find each other's files by key.
Each server deletes the file of a block when the block's slot gets another one.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from pypto_serving.store.base import DIGEST_BYTES, FULL, Piece, digest, reason_of
from pypto_serving.store.folder import FORMATS, Folder, FolderStore, Meta
from pypto_serving.store.slab import sync_folder
from pypto_serving.types.tier import KEY_BYTES, TierInventory
from pypto_serving.util import Clock, open_regular, write_at

log = logging.getLogger(__name__)

MAGIC = b"pypto KV block 1"
HEADER_BYTES = len(MAGIC) + KEY_BYTES + DIGEST_BYTES
STATS_AT_ONCE = 16
"""Examine this many folders or files at once, because each one waits for the network."""
USED_AGAIN_S = 3600.0
"""A load updates the time of a file that is older than this."""
UNUSED_S = 86400.0
"""A file that was not used for this time, and gets no slot at the start, belongs to no running server."""

_NAME = re.compile(r"([0-9a-f]{32})\.(\d+)")
_PART = ".part"
_MISSING = frozenset({errno.ENOENT, errno.ESTALE})


class FileStore(FolderStore):
    """Reads and writes a shared folder of blocks. Owns the slots that this server keeps in it."""

    def __init__(
        self,
        folder: str | Path,
        fingerprint: bytes,
        block_bytes: tuple[int, ...],
        num_slots: tuple[int, ...],
        *,
        model: str = "",
        known: bool = False,
        clock: Clock | None = None,
    ) -> None:
        """Open the folder. Raises ConfigError if nothing can be stored there, unless it is `known` as used before."""
        self._block_bytes, self._num_slots = block_bytes, num_slots
        self._keys: dict[tuple[int, int], bytes] = {}
        self._slots: dict[tuple[int, bytes], int] = {}
        self._pool = ThreadPoolExecutor(STATS_AT_ONCE, "stat")
        meta = Meta(FORMATS["files"], "files", fingerprint.hex(), block_bytes, model)
        super().__init__(Path(folder), meta, known=known, clock=clock)
        if self._folder is None:
            self._inventory = TierInventory(tier="disk", writable=False, reason=self._faults.reason)

    def _open(self, folder: Folder) -> None:
        self._path = folder.path
        self._inventory = self._take_slots()

    def inventory(self) -> TierInventory:
        """See `Store`. At the start, the most recently used files get the slots."""
        return self._inventory

    def _take_slots(self) -> TierInventory:
        """Assign slots to the most recently used files, and delete other files that are no longer used."""
        groups: list[int] = []
        slots: list[int] = []
        keys: list[bytes] = []
        used = [0] * len(self._num_slots)
        for used_at_s, key, group in sorted(self._scan(), reverse=True):
            slot = used[group]
            if slot >= self._num_slots[group]:
                if time.time() - used_at_s > UNUSED_S:
                    self._unlink(group, key)
                continue
            used[group] += 1
            self._keys[group, slot], self._slots[group, key] = key, slot
            groups.append(group)
            slots.append(slot)
            keys.append(key)
        return TierInventory(
            tier="disk",
            groups=np.array(groups[::-1], "<i4").tobytes(),
            slots=np.array(slots[::-1], "<i4").tobytes(),
            keys=b"".join(reversed(keys)),
            writable=not self._faults.reason,
            shared=True,
            reason=self._faults.reason,
        )

    def _scan(self) -> Iterator[tuple[float, bytes, int]]:
        """Yield (time of use, key, group) of all files of the right size; scan folders in parallel. Raises OSError."""
        folders = [path for path in self._path.iterdir() if len(path.name) == 2 and path.is_dir()]
        for found in self._pool.map(self._scan_folder, folders):
            yield from found

    def _scan_folder(self, folder: Path) -> list[tuple[float, bytes, int]]:
        """List the files of a folder. Other servers delete files meanwhile."""
        found: list[tuple[float, bytes, int]] = []
        with self._saying("a folder cannot be listed"), os.scandir(folder) as entries:
            for entry in entries:
                with self._saying("a file cannot be examined"):
                    found += self._examine(entry)
        return found

    def _examine(self, entry: os.DirEntry[str]) -> list[tuple[float, bytes, int]]:
        """Return the time of use, key and group of a block's file, if it is one. Raises OSError."""
        name = _NAME.fullmatch(entry.name)
        if name is not None and (group := int(name[2])) < len(self._block_bytes):
            stat = entry.stat()
            if stat.st_size == HEADER_BYTES + self._block_bytes[group]:
                return [(stat.st_mtime, bytes.fromhex(name[1]), group)]
        elif entry.name.endswith(_PART) and time.time() - entry.stat().st_mtime > UNUSED_S:
            Path(entry.path).unlink(missing_ok=True)  # leftover of a killed server
        return []

    @contextlib.contextmanager
    def _saying(self, what: str) -> Iterator[None]:
        """Say once why the system refuses something, unless a file or folder is gone."""
        try:
            yield
        except OSError as error:
            if error.errno not in _MISSING:
                self._faults.say("scan", f"{what}: {reason_of(error)}")

    def store(self, pieces: Sequence[Piece]) -> list[bool]:
        """See `Store`. One thread at a time."""
        self._is_there()
        stored = [self._store(piece) for piece in pieces]
        for folder in {
            self._file(piece.group, piece.key).parent for piece, done in zip(pieces, stored, strict=True) if done
        }:
            try:
                sync_folder(folder)
            except OSError as error:
                self._faults.say("sync", f"names are not certain to last: {reason_of(error)}")
        return stored

    def _store(self, piece: Piece) -> bool:
        if self._folder is None or self._faults.reason:
            return False
        has_room = self._evict(piece)
        if not has_room and not self._faults.may_try():
            return False
        try:
            self._write(piece)
        except OSError as error:
            if error.errno in FULL:
                self._faults.full(error)
            elif error.errno == errno.EROFS:
                self._faults.stop_storing(reason_of(error))
            else:
                self._faults.say(f"write {error.errno}", f"writing failed: {reason_of(error)}")
            return False
        if not has_room:
            self._faults.found_room()
        self._keys[piece.group, piece.slot], self._slots[piece.group, piece.key] = piece.key, piece.slot
        return True

    def _evict(self, piece: Piece) -> bool:
        """Delete the file of the slot's block, unless it is the new block, or another slot has it, too.

        Return whether the slot held a block, so that there is room for another one.
        """
        key = self._keys.pop((piece.group, piece.slot), None)
        if key is None or self._slots.get((piece.group, key)) != piece.slot:
            return False
        del self._slots[piece.group, key]
        if key != piece.key:
            self._unlink(piece.group, key)
        return True

    def _write(self, piece: Piece) -> None:
        """Write the file of a block, unless another server has stored one of the right size, which is complete."""
        path, size = self._file(piece.group, piece.key), HEADER_BYTES + piece.memory.nbytes
        try:
            if path.stat().st_size == size:
                return os.utime(path)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                path.parent.mkdir(mode=0o700)
                sync_folder(self._path)
        header = MAGIC + piece.key + digest(piece.key, piece.memory)
        part = path.with_name(f"{os.uname().nodename}-{os.getpid()}-{threading.get_ident()}{_PART}")
        try:
            with part.open("wb", buffering=0) as file:
                write_at(file.fileno(), header, 0)
                write_at(file.fileno(), piece.memory.data, len(header))
                os.fdatasync(file.fileno())
            part.rename(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def load(self, pieces: Sequence[Piece]) -> list[bool]:
        """See `Store`."""
        loaded = [self._load(piece) for piece in pieces]
        if not all(loaded):
            self._is_there()
        return loaded

    def _load(self, piece: Piece) -> bool:
        if self._folder is None:
            return False
        try:
            file = open_regular(self._file(piece.group, piece.key))
        except OSError as error:
            if error.errno not in _MISSING:
                self._faults.say(f"read {error.errno}", f"reading failed: {reason_of(error)}")
            return False
        try:
            if read_block(file, piece):
                self._renew(file)
                return True
            if not self._faults.reason:
                self._faults.say("damaged", "a block is damaged, and is deleted")
                self._unlink(piece.group, piece.key)
        except OSError as error:
            if error.errno not in _MISSING:
                self._faults.say(f"read {error.errno}", f"reading failed: {reason_of(error)}")
        finally:
            os.close(file)
        return False

    def _renew(self, file: int) -> None:
        if not self._faults.reason and time.time() - os.fstat(file).st_mtime > USED_AGAIN_S:
            try:
                os.utime(file)
            except OSError as error:
                self._faults.say("use", f"times of use are not kept: {reason_of(error)}")

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Store`: return which keys have a file of the right size."""
        return [False] * len(keys) if self._folder is None else list(self._pool.map(self._find, keys))

    def _find(self, key: bytes) -> bool:
        for group, size in enumerate(self._block_bytes):
            try:
                if self._file(group, key).stat().st_size == HEADER_BYTES + size:
                    return True
            except OSError:
                continue
        return False

    def _file(self, group: int, key: bytes) -> Path:
        name = key.hex()
        return self._path / name[:2] / f"{name}.{group}"

    def _unlink(self, group: int, key: bytes) -> None:
        try:
            self._file(group, key).unlink(missing_ok=True)
        except OSError as error:
            self._faults.say("delete", f"blocks cannot be deleted: {reason_of(error)}")

    def clear(self) -> None:
        """See `Store`. Also deletes blocks of other servers."""
        if self._folder is not None and not self._faults.reason:
            try:
                for _, key, group in self._scan():
                    self._unlink(group, key)
            except OSError as error:
                self._faults.say("delete", f"blocks cannot be deleted: {reason_of(error)}")
            self._keys.clear()
            self._slots.clear()

    def close(self) -> None:
        """Close the folder."""
        self._pool.shutdown()
        self._close_files()


def read_block(file: int, piece: Piece) -> bool:
    """Read a block; return False if it is damaged. Raises OSError."""
    header = bytearray(HEADER_BYTES)
    count = os.preadv(file, [header, piece.memory.data], 0)
    while HEADER_BYTES <= count < HEADER_BYTES + piece.memory.nbytes:
        more = os.preadv(file, [piece.memory.data[count - HEADER_BYTES :]], count)
        if more == 0:
            return False
        count += more
    whole = count == HEADER_BYTES + piece.memory.nbytes
    return whole and header == MAGIC + piece.key + digest(piece.key, piece.memory)


def block_files(path: Path, num_groups: int) -> Iterator[tuple[Path, bytes, int]]:
    """Yield (file, key, group) of all blocks in a fingerprint's folder. Raises OSError."""
    for file in path.glob("??/*"):
        name = _NAME.fullmatch(file.name)
        if name is not None and int(name[2]) < num_groups:
            yield file, bytes.fromhex(name[1]), int(name[2])
