"""Keep files and batches in a folder, separately for each API key."""

from __future__ import annotations

import fcntl
import os
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from pypto_serving.api.batch.schemas import Batch, File
from pypto_serving.errors import ConfigError, RequestError

MAX_FILES, MAX_BATCHES = 1000, 1000
"""Limits of files and batches per key."""
MAX_BYTES = 16 << 30
"""Limit of the bytes of all files of one key. A running batch may exceed it, but no other batch begins then."""
PIECE_BYTES = 64 << 10
_ID = re.compile(r"(?:file|batch)[-_][0-9a-f]{32}")
T = TypeVar("T", File, Batch)
Buffer = bytes | memoryview


class KeyStore:
    """Owns the files and batches of one client, in a folder of its own. A change is on disk when its call returns."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def of(cls, client: str, folder: Path) -> KeyStore:
        """Return the store of a client, named as by `Clients`, in the folder of all."""
        own = folder / client
        own.mkdir(mode=0o700, exist_ok=True)
        return cls(own)

    @classmethod
    def of_all(cls, folder: Path) -> list[KeyStore]:
        """Return the stores of all clients."""
        return [cls(path) for path in sorted(folder.iterdir()) if path.is_dir()]

    @property
    def client(self) -> str:
        """Return the name of the client."""
        return self._folder.name

    def content(self, file_id: str) -> Path:
        """Return the path of a file's content."""
        return self._path(file_id, ".jsonl")

    def read(self, file: File) -> Iterator[bytes]:
        """Open a file; iterate over its bytes up to the size in its record. Raises RequestError if there is none."""
        try:
            opened = self.content(file.id).open("rb")
        except FileNotFoundError:
            raise _lost(file.id) from None
        return _pieces(opened, file.bytes)

    def new_file(self, filename: str, purpose: str, created_at: int, data: Buffer = b"") -> File:
        """Store a file. Raises RequestError if the key has too many already."""
        self.require_room(len(data))
        file = File(f"file-{uuid.uuid4().hex}", 0, created_at, filename, purpose)
        try:
            self.content(file.id).write_bytes(data)
            self.save(file)
        except OSError:
            with suppress(OSError):
                self.content(file.id).unlink()
            raise
        return self.file(file.id)

    def require_room(self, size: int = 0) -> None:
        """Raise RequestError unless another file of `size` bytes may be stored."""
        files = self.files()
        if len(files) >= MAX_FILES:
            raise RequestError(f"there are {MAX_FILES} files already; delete some", param="file", code="too_many_files")
        if sum(file.bytes for file in files) + size > MAX_BYTES:
            raise RequestError(
                f"files have at most {MAX_BYTES} bytes; delete some", param="file", code="too_many_bytes"
            )

    def file(self, file_id: str) -> File:
        """Return the record of a file. Raises RequestError if there is none."""
        file = self._load(file_id, File)
        try:
            return msgspec.structs.replace(file, bytes=self.content(file_id).stat().st_size)
        except FileNotFoundError:
            raise _lost(file_id) from None

    def files(self) -> list[File]:
        """Return all files, the newest first."""
        return self._all("file-*.json", self.file)

    def batch(self, batch_id: str) -> Batch:
        """Return the record of a batch. Raises RequestError if there is none."""
        return self._load(batch_id, Batch)

    def batches(self) -> list[Batch]:
        """Return all batches, the newest first."""
        return self._all("batch_*.json", self.batch)

    def save(self, value: File | Batch) -> None:
        """Write the record of a file or a batch, replacing the earlier one."""
        path = self._path(value.id, ".json")
        fresh = path.with_suffix(".new")
        try:
            fresh.write_bytes(msgspec.json.encode(value))
            fresh.replace(path)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise

    def delete(self, file_id: str) -> None:
        """Delete a file. Raises RequestError if there is none."""
        self.file(file_id)
        self._path(file_id, ".json").unlink()
        self.content(file_id).unlink()

    def clear_up(self) -> None:
        """Delete the leftovers of a killed server: unfinished records, and files without a record."""
        for path in self._folder.iterdir():
            begun = path.suffix == ".new" or (path.suffix == ".jsonl" and not path.with_suffix(".json").exists())
            if begun and _ID.fullmatch(path.stem):
                path.unlink()

    def forget(self, batch: Batch) -> None:
        """Delete the record of a batch; its files stay."""
        self._path(batch.id, ".json").unlink()

    def _all(self, pattern: str, load: Callable[[str], T]) -> list[T]:
        found: list[T] = []
        for path in self._folder.glob(pattern):
            with suppress(RequestError):  # deleted meanwhile, or damaged
                found.append(load(path.stem))
        return sorted(found, key=lambda each: (-each.created_at, each.id))

    def _load(self, name: str, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(self._path(name, ".json").read_bytes(), type=kind)
        except (FileNotFoundError, msgspec.DecodeError):
            raise _lost(name) from None

    def _path(self, name: str, suffix: str) -> Path:
        if not _ID.fullmatch(name):
            raise _lost(name)
        return self._folder / (name + suffix)


def _pieces(file: BinaryIO, size: int) -> Iterator[bytes]:
    with file:
        while size and (piece := file.read(min(size, PIECE_BYTES))):
            size -= len(piece)
            yield piece


def occupy(folder: Path) -> BinaryIO:
    """Lock a folder until the returned file is closed. Raises ConfigError if another server has locked it, OSError."""
    file = (folder / "lock").open("ab")
    try:
        lock(file)
    except BlockingIOError:
        file.close()
        raise ConfigError(f"another server uses the folder of batches {folder}; give another") from None
    return file


def _lost(name: str) -> RequestError:
    return RequestError(f"there is no {name[:100]!r}", code="not_found", status=404)


def read_salt(folder: Path) -> bytes:
    """Return the salt of a folder; make it at first use."""
    path = folder / "salt"
    if not path.exists():
        fresh = path.with_suffix(".new")
        fresh.touch(mode=0o600)
        fresh.write_bytes(os.urandom(32))
        fresh.replace(path)
    return path.read_bytes()


def lock(file: BinaryIO) -> None:
    """Lock a file until it is closed, if its file system can. Raises BlockingIOError if another process has done so."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # a file system without locks
        pass
