"""Slab: the slots of one group in one large file, with direct I/O if the file system supports it.

Slot s begins at byte s * stride, where stride is the block size rounded up to a multiple of 4096 bytes. The file size
gives the number of slots that have room on disk.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from pypto_serving.types.arrays import BlockBytes
from pypto_serving.types.tier import ALIGNMENT
from pypto_serving.util import ceil_div, open_regular

GROWTH_BYTES = 128 << 20
"""A slab grows in steps of about this many bytes."""
GROWTH_SHARE = 16
"""A step of growth takes at most 1/16 of the free bytes of the disk."""


def stride_of(block_bytes: int) -> int:
    """Return the bytes of a slot on disk."""
    return ceil_div(block_bytes, ALIGNMENT) * ALIGNMENT


class Slab:
    """Owns the file of one group's slots; the first `num_held` of them have room on disk.

    Any number of threads may read while one writes.
    """

    def __init__(self, folder: Path, group: int, block_bytes: int, num_slots: int, *, writable: bool) -> None:
        """Open the file if it exists, and truncate it to `num_slots` if writable. Raises OSError."""
        self._path = folder / f"g{group}.slab"
        self._block_bytes, self._stride = block_bytes, stride_of(block_bytes)
        self._num_slots, self._writable = num_slots, writable
        self._file: int | None = None
        self.num_held = 0
        self._buffers: deque[BlockBytes] = deque()
        self._unsynced: list[int] = []
        try:
            with contextlib.suppress(FileNotFoundError):
                self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        mode = os.O_RDWR if self._writable else os.O_RDONLY
        try:
            self._file = open_regular(self._path, mode | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._file = open_regular(self._path, mode)
        size, wanted = os.fstat(self._file).st_size, self._num_slots * self._stride
        if self._writable and size > wanted:
            os.ftruncate(self._file, wanted)
        self.num_held = min(size, wanted) // self._stride

    @property
    def allocated_bytes(self) -> int:
        """Bytes on disk of all slots that have room."""
        return self.num_held * self._stride

    def growth(self, slot: int, max_bytes: int) -> int:
        """Return the bytes to grow by so that `slot` has room: one step, or less if `max_bytes` or the disk is short.

        Never return less than the slot needs. A step takes only a small part of the free disk, so that the slabs of all
        groups can share it.
        """
        disk = os.statvfs(self._path.parent)
        max_bytes = min(max_bytes, disk.f_bavail * disk.f_frsize // GROWTH_SHARE)
        step = max(1, GROWTH_BYTES // self._stride)
        wanted = min(ceil_div(slot + 1, step) * step, self._num_slots) - self.num_held
        return max(slot + 1 - self.num_held, min(wanted, max_bytes // self._stride)) * self._stride

    def grow(self, num_bytes: int) -> None:
        """Grow by `num_bytes`, a multiple of the stride. Raises OSError, and then leaves the size unchanged."""
        # No direct I/O here: if the file system cannot allocate, libc writes zeros from unaligned buffers.
        file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(file, self.allocated_bytes, num_bytes)
        except OSError:
            os.ftruncate(file, self.allocated_bytes)
            raise
        finally:
            os.close(file)
        if self._file is None:
            sync_folder(self._path.parent)
            self._open()
        else:
            self.num_held += num_bytes // self._stride

    def read(self, slot: int, memory: BlockBytes) -> None:
        """Read a slot into `memory`. Raises OSError, with ENODATA if the file is too short."""
        if self._file is None:
            raise _too_short()
        if self._can_use(memory):
            return _transfer(os.preadv, self._file, memory.data, slot * self._stride)
        with self._borrow_buffer() as buffer:
            _transfer(os.preadv, self._file, buffer.data, slot * self._stride)
            np.copyto(memory, buffer[: self._block_bytes])

    def write(self, slot: int, memory: BlockBytes) -> None:
        """Write `memory` to a slot that has room; only `sync` ensures that it is on disk. Raises OSError."""
        assert self._file is not None
        offset = slot * self._stride
        self._unsynced.append(offset)
        if self._can_use(memory):
            return _transfer(os.pwritev, self._file, memory.data, offset)
        with self._borrow_buffer() as buffer:
            np.copyto(buffer[: self._block_bytes], memory)
            _transfer(os.pwritev, self._file, buffer.data, offset)

    def _can_use(self, memory: BlockBytes) -> bool:
        """Return whether I/O works on `memory` without an aligned buffer in between."""
        assert self._file is not None
        if not _is_direct(self._file):
            return True
        address: int = memory.__array_interface__["data"][0]  # several times faster than memory.ctypes
        return address % ALIGNMENT == 0 and self._block_bytes == self._stride

    @contextlib.contextmanager
    def _borrow_buffer(self) -> Iterator[BlockBytes]:
        """Lend a page-aligned buffer of one stride. Any thread may call this."""
        try:
            buffer = self._buffers.pop()
        except IndexError:
            buffer = np.frombuffer(mmap.mmap(-1, self._stride), np.uint8)
        try:
            yield buffer
        finally:
            self._buffers.append(buffer)

    def sync(self) -> None:
        """Wait until written slots are on disk, and drop them from the page cache. Raises OSError."""
        unsynced, self._unsynced = self._unsynced, []
        if self._file is not None and unsynced:
            os.fdatasync(self._file)
            if not _is_direct(self._file):
                for offset in unsynced:
                    os.posix_fadvise(self._file, offset, self._stride, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _transfer(call: Callable[[int, list[memoryview], int], int], file: int, data: memoryview, offset: int) -> None:
    """Read or write all of `data`. If direct I/O is refused, use the page cache for this file from then on."""
    done = 0
    while done < len(data):
        try:
            count = call(file, [data[done:]], offset + done)
        except OSError as error:
            if error.errno != errno.EINVAL or not _is_direct(file):
                raise
            fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_DIRECT)
            continue
        if count == 0:
            raise _too_short()
        done += count


def _is_direct(file: int) -> bool:
    return bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)


def _too_short() -> OSError:
    return OSError(errno.ENODATA, "the file is shorter than its slots")


def sync_folder(folder: Path) -> None:
    """Wait until the file names in a folder are on disk."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
