"""Folder: a fingerprint's folder of blocks inside the user's folder, with locks that show which processes use it.

- `in_use`: each process that has the folder open holds a shared lock; a process that deletes it, an exclusive one.
- `writer`: locked by the process that writes slots.
- `meta.json`: describes the folder's content. It is written first.

A lock ends with its process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from pypto_serving.errors import ConfigError
from pypto_serving.store.base import FULL, StoreFaults, reason_of
from pypto_serving.store.slab import sync_folder
from pypto_serving.types.tier import PART_NAME
from pypto_serving.util import Clock, hash128, open_regular, read_regular

log = logging.getLogger(__name__)

Kind = Literal["slots", "files"]
FORMATS: dict[str, int] = {"slots": 2, "files": 1}
"""The format of each kind of folder. A writer empties a folder of an earlier format, but does not touch a later one."""
IN_USE, WRITER, META = "in_use", "writer", "meta.json"

_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS})


class Meta(msgspec.Struct, frozen=True):
    """Description of a folder. `fingerprint`: in hexadecimal digits; `model`: a name for people, if known."""

    format: int
    kind: Kind
    fingerprint: str
    block_bytes: tuple[int, ...]
    model: str = ""

    def fits(self, other: Meta | None) -> bool:
        """Return whether `other` describes the same blocks, ignoring the name of the model."""
        return other is not None and msgspec.structs.replace(other, model=self.model) == self


class _Format(msgspec.Struct):
    format: int
    kind: str = ""


class Unusable(Exception):
    """A fingerprint's folder cannot be used now, though the user's folder can; the message says why."""


class Folder:
    """A fingerprint's folder that this process has open; `reason`: why it is not `writable`."""

    def __init__(self, root: Path, meta: Meta, *, known: bool = False) -> None:
        """Open or create the folder. Raises ConfigError if nothing can be created in `root`, else Unusable.

        For a folder that was used before, or is `known` to have been, raises only Unusable.
        """
        self.path, self.meta = root / folder_name(meta), meta
        self.writable, self.reason = True, ""
        self._locks: list[int] = []
        try:
            self._open()
        except OSError as error:
            self.close()
            if known or error.errno in FULL or os.path.isfile(self.path / META):  # noqa: PTH113 - raises nothing
                raise Unusable(f"it cannot be opened: {reason_of(error)}") from None
            raise ConfigError(
                f"the option kv-disk is {root}, which cannot be used: {reason_of(error)}; give a folder that can be "
                "written"
            ) from None
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        try:
            self._locks.append(self._join())
            self._held()  # raises for a later format, which must not be touched
            if self.meta.kind == "slots":
                self._become_writer()
        except OSError as error:
            if error.errno != errno.EROFS or not self.path.is_dir():
                raise
            self._read_only(reason_of(error))
        held = self._held()
        if not self.writable:
            if not self.meta.fits(held):
                raise Unusable(f"{self.reason}, and it is not complete")
            return
        if not self.meta.fits(held):
            self._begin(held)
        elif held is not None and not held.model and self.meta.model:
            with contextlib.suppress(OSError):  # the folder works without the model's name
                self._write_meta()
        os.utime(self.path / IN_USE)

    def _join(self) -> int:
        """Take a shared lock of `in_use`, once no process is deleting the folder."""
        while True:
            try:
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            except FileExistsError:
                with contextlib.suppress(FileNotFoundError):  # deleted before the check that it is a folder
                    if not stat.S_ISDIR(self.path.lstat().st_mode):
                        raise
                continue
            try:
                lock = os.open(self.path / IN_USE, os.O_RDWR | os.O_CREAT, 0o600)
            except FileNotFoundError:
                continue  # deleted between the two calls
            try:
                _lock(lock, fcntl.LOCK_SH)
                if os.path.samestat(os.fstat(lock), (self.path / IN_USE).stat()):
                    return lock
            except FileNotFoundError:
                pass  # deleted meanwhile
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)

    def _become_writer(self) -> None:
        lock = os.open(self.path / WRITER, os.O_RDWR | os.O_CREAT, 0o600)
        self._locks.append(lock)
        if _lock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
        else:
            pid = os.pread(lock, 20, 0).decode(errors="replace")
            self._read_only(f"another server, process {pid}, writes to it" if pid else "another server writes to it")

    def _read_only(self, reason: str) -> None:
        self.writable, self.reason = False, reason

    def _held(self) -> Meta | None:
        try:
            return read_meta(self.path)
        except FileNotFoundError:
            return None

    def _begin(self, held: Meta | None) -> None:
        """Write `meta.json`. Blocks stay if the old one is damaged, since the folder's name identifies them."""
        if held is not None:
            _empty(self.path)
        self._write_meta()

    def _write_meta(self) -> None:
        temporary = self.path / f"{META}.tmp"
        with temporary.open("wb") as file:
            file.write(msgspec.json.encode(self.meta))
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(self.path / META)
        sync_folder(self.path)
        sync_folder(self.path.parent)

    def is_there(self) -> bool:
        """Return whether the path still leads to this folder. If not, its open files can still be read."""
        try:
            return not self._locks or os.path.samestat(os.fstat(self._locks[0]), (self.path / IN_USE).stat())
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True  # the next read or write will report the error

    def close(self) -> None:
        """Release the locks."""
        if self.writable and self._locks:
            with contextlib.suppress(OSError):
                os.utime(self.path / IN_USE)
        for lock in self._locks:
            os.close(lock)
        self._locks.clear()


class FolderStore:
    """Base of stores in a folder: the fingerprint's folder, None if it cannot be used, and its faults."""

    def __init__(self, root: Path, meta: Meta, *, known: bool, clock: Clock | None) -> None:
        """Open the folder as `Folder` does, and what is in it. The store stays empty if that fails."""
        self._root = root
        self._faults = StoreFaults(f"disk tier in {root}", log, clock or time.monotonic)
        self._folder: Folder | None = None
        try:
            self._folder = Folder(root, meta, known=known)
            if not self._folder.writable:
                self._faults.stop_storing(self._folder.reason)
            self._open(self._folder)
        except (OSError, Unusable) as error:
            self._close_files()
            self._faults.stop_storing(reason_of(error))

    def _open(self, folder: Folder) -> None:
        raise NotImplementedError

    @property
    def writable(self) -> bool:
        return not self._faults.reason

    def _is_there(self) -> bool:
        """Return whether the folder is still at its path. If not, stop storing."""
        if self._folder is None or self._folder.is_there():
            return True
        self._faults.folder_gone()
        return False

    def _close_files(self) -> None:
        if self._folder is not None:
            self._folder.close()
            self._folder = None


def folder_name(meta: Meta) -> str:
    """Return 32 hexadecimal digits that differ between blocks that must not share a folder."""
    sizes = ",".join(map(str, meta.block_bytes))
    return hash128(meta.kind.encode(), meta.fingerprint.encode(), sizes.encode()).hex()


def read_meta(path: Path) -> Meta | None:
    """Read `meta.json`; return None if it is damaged. Raises OSError, and Unusable for a later format."""
    text = read_regular(path / META)
    try:
        given = msgspec.json.decode(text, type=_Format)
        known = FORMATS.get(given.kind, max(FORMATS.values()))
        if given.format > known:
            raise Unusable(f"it has format {given.format}, made by a later version; this one knows {known}")
        return msgspec.json.decode(text, type=Meta)
    except msgspec.DecodeError:
        return None


@dataclass(frozen=True, slots=True)
class FolderUsage:
    """Usage of a folder: bytes on disk, time of last use (Unix time), whether a server has it open."""

    path: Path
    num_bytes: int
    used_at_s: float
    in_use: bool


def usage(path: Path) -> FolderUsage:
    """Measure a folder. Raises OSError."""
    lock = take_alone(path)
    if lock is not None:
        os.close(lock)
    stats = list(_stats(path))
    return FolderUsage(
        path, sum(s.st_blocks * 512 for s in stats), max((s.st_mtime for s in stats), default=0.0), lock is None
    )


def _stats(path: Path) -> Iterator[os.stat_result]:
    """Examine all files in a folder but those that servers delete meanwhile. Raises OSError."""
    with os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if entry.is_dir(follow_symlinks=False):
                    yield from _stats(Path(entry.path))
                else:
                    yield entry.stat()


def fingerprint_folders(root: Path) -> list[Path]:
    """Return all folders of blocks in `root`, including half-deleted ones. Raises OSError."""
    return sorted(path for path in root.iterdir() if PART_NAME.fullmatch(path.name) and (path / IN_USE).is_file())


def open_lock(path: Path) -> int:
    """Open the file `in_use` of a folder in order to lock it. Raises OSError."""
    try:
        return os.open(path / IN_USE, os.O_RDWR)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        return open_regular(path / IN_USE)


def take_alone(path: Path) -> int | None:
    """Lock a folder exclusively until the lock is closed; return None if a server has it open. Raises OSError."""
    lock = open_lock(path)
    try:
        alone = _lock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if alone and os.path.samestat(os.fstat(lock), (path / IN_USE).stat()):  # else it was deleted meanwhile
            return lock
    except BaseException:
        os.close(lock)
        raise
    os.close(lock)
    return None


def delete(path: Path) -> bool:
    """Delete a folder; return False if a server has it open or a later version made it. Raises OSError."""
    lock = take_alone(path)
    if lock is None:
        return False
    try:
        with contextlib.suppress(FileNotFoundError):  # half deleted, or just created
            read_meta(path)
        _empty(path)
        (path / WRITER).unlink(missing_ok=True)
        (path / IN_USE).unlink()  # last: after a kill, the remaining folder is still recognized as ours
        path.rmdir()
        return True
    except Unusable:
        return False
    finally:
        os.close(lock)


def _empty(path: Path) -> None:
    """Delete everything except the locks; `meta.json` last, so that the format is still known after a kill."""
    for entry in sorted(path.iterdir(), key=lambda entry: entry.name == META):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name not in (IN_USE, WRITER):
            entry.unlink()


def make_room(root: Path, own: Path, own_bytes: int, size_bytes: int) -> int:
    """Delete unused folders beside `own`, longest unused first, until the rest fits. Return the deleted bytes."""
    others: list[FolderUsage] = []
    for path in fingerprint_folders(root):
        with contextlib.suppress(FileNotFoundError):  # another server deletes it as well
            if path != own and not (found := usage(path)).in_use:
                others.append(found)
    excess, deleted = own_bytes + sum(other.num_bytes for other in others) - size_bytes, 0
    for other in sorted(others, key=lambda other: other.used_at_s):
        if deleted >= excess:
            break
        if delete(other.path):
            deleted += other.num_bytes
    return deleted


def _lock(file: int, how: int) -> bool:
    """Lock a file; return False if that would wait. On a file system without locks, files count as locked."""
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True
