"""Slab: the content of a group's slots, in a few large files (segments), with direct I/O where that works.

Slot s lies in segment s // n at byte (s % n) * stride, where stride is the block size rounded up to 4096 bytes and n is
the number of slots in a segment. A segment's size gives the number of its slots that have room on disk.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pypto_serving.types.arrays import BlockBytes
from pypto_serving.types.tier import ALIGNMENT
from pypto_serving.util import ceil_div, open_regular

SEGMENT_BYTES = 4 << 30
GROWTH_BYTES = 128 << 20
"""A segment grows by about this."""
GROWTH_SHARE = 16
"""A step of growth takes at most one part in so many of what the disk has left."""


def stride_of(block_bytes: int) -> int:
    """Return the bytes that a slot takes on disk."""
    return ceil_div(block_bytes, ALIGNMENT) * ALIGNMENT


class Slab:
    """Owns the segments of one group. Any number of threads may read beside one that writes."""

    def __init__(self, folder: Path, group: int, block_bytes: int, num_slots: int, *, writable: bool) -> None:
        """Open the segments that exist, and delete what lies beyond `num_slots`. Raises OSError."""
        self._folder, self._name = folder, f"g{group}"
        self._block_bytes, self._stride = block_bytes, stride_of(block_bytes)
        self._per_segment = max(1, SEGMENT_BYTES // self._stride)
        self._num_slots, self._writable = num_slots, writable
        self._files: dict[int, int] = {}
        self._slots: dict[int, int] = {}
        self._buffers = _Buffers(self._stride)
        self._unsynced: dict[int, list[int]] = {}
        try:
            self._open_all()
        except BaseException:
            self.close()
            raise

    def _open_all(self) -> None:
        for path in self._folder.glob(f"{self._name}-*.slab"):
            number = path.stem.partition("-")[2]
            segment = int(number) if number.isdecimal() else -1
            if path != self._path(segment):
                continue
            wanted = self._wanted(segment)
            if self._writable and wanted == 0:
                path.unlink()
            elif wanted:
                size = path.stat().st_size
                if self._writable and size > wanted * self._stride:
                    size = wanted * self._stride
                    os.truncate(path, size)
                self._open(segment, path, size)

    def _wanted(self, segment: int) -> int:
        """Return how many slots of a segment may be used."""
        return max(0, min(self._per_segment, self._num_slots - segment * self._per_segment))

    def _path(self, segment: int) -> Path:
        return self._folder / f"{self._name}-{segment:04d}.slab"

    def _open(self, segment: int, path: Path, size: int) -> None:
        mode = os.O_RDWR if self._writable else os.O_RDONLY
        try:
            self._files[segment] = open_regular(path, mode | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._files[segment] = open_regular(path, mode)
        self._slots[segment] = min(size // self._stride, self._wanted(segment))

    @property
    def allocated_bytes(self) -> int:
        """Bytes that all segments take on disk."""
        return sum(self._slots.values()) * self._stride

    def has_room(self, slot: int) -> bool:
        """Return whether a slot has room on disk."""
        segment, position = divmod(slot, self._per_segment)
        return position < self._slots.get(segment, 0)

    def without_room(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return those of `slots` that have no room on disk."""
        segments, positions = np.divmod(slots, self._per_segment)
        held = np.zeros(ceil_div(self._num_slots, self._per_segment) + 1, np.int64)
        for segment, count in self._slots.items():
            held[segment] = count
        return slots[positions >= held[segments]]

    def growth(self, slot: int, max_bytes: int) -> int:
        """Return the bytes to grow by for `slot` to have room: one step, or less if `max_bytes` or the disk is short.

        It is never less than the slot needs. A step takes a small part of what the disk has left, so that the slabs of
        all groups can use the rest.
        """
        segment, position = divmod(slot, self._per_segment)
        disk = os.statvfs(self._folder)
        max_bytes = min(max_bytes, disk.f_bavail * disk.f_frsize // GROWTH_SHARE)
        have, step = self._slots.get(segment, 0), max(1, GROWTH_BYTES // self._stride)
        needed = position + 1 - have
        wanted = min(ceil_div(position + 1, step) * step, self._wanted(segment)) - have
        return max(needed, min(wanted, max_bytes // self._stride)) * self._stride

    def grow(self, slot: int, num_bytes: int) -> None:
        """Grow the segment of `slot` by `num_bytes`. Raises OSError, and then has not grown."""
        segment = slot // self._per_segment
        path, have = self._path(segment), self._slots.get(segment, 0) * self._stride
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)  # not direct: where a file system cannot, libc writes
        try:
            _allocate(file, have, num_bytes)
        finally:
            os.close(file)
        if segment in self._files:
            self._slots[segment] += num_bytes // self._stride
        else:
            sync_folder(self._folder)
            self._open(segment, path, have + num_bytes)

    def read(self, slot: int, memory: BlockBytes) -> None:
        """Read a slot into `memory`. Raises OSError, with ENODATA if the segment is too short."""
        segment, offset = self._place(slot)
        if segment not in self._files:
            raise _too_short()
        file = self._files[segment]
        if not _is_direct(file) or self._fits(memory):
            return _transfer(os.preadv, file, memory.data, offset)
        with self._buffers.borrow() as buffer:
            _transfer(os.preadv, file, buffer.data, offset)
            np.copyto(memory, buffer[: self._block_bytes])

    def write(self, slot: int, memory: BlockBytes) -> None:
        """Write `memory` to a slot that has room; it is on disk after `sync`. Raises OSError."""
        segment, offset = self._place(slot)
        file = self._files[segment]
        self._unsynced.setdefault(segment, []).append(offset)
        if not _is_direct(file) or self._fits(memory):
            return _transfer(os.pwritev, file, memory.data, offset)
        with self._buffers.borrow() as buffer:
            np.copyto(buffer[: self._block_bytes], memory)
            _transfer(os.pwritev, file, buffer.data, offset)

    def _place(self, slot: int) -> tuple[int, int]:
        segment, position = divmod(slot, self._per_segment)
        return segment, position * self._stride

    def _fits(self, memory: BlockBytes) -> bool:
        """Return whether direct I/O can use `memory` as it is."""
        address: int = memory.__array_interface__["data"][0]  # several times faster than by ctypes
        return address % ALIGNMENT == 0 and self._block_bytes == self._stride

    def sync(self) -> None:
        """Wait until written slots are on disk, and drop them from the page cache. Raises OSError."""
        unsynced, self._unsynced = self._unsynced, {}
        for segment, offsets in unsynced.items():
            file = self._files[segment]
            os.fdatasync(file)
            if not _is_direct(file):
                for offset in offsets:
                    os.posix_fadvise(file, offset, self._stride, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()


class _Buffers:
    """Page-aligned buffers of one size, made when needed and reused."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: deque[BlockBytes] = deque()

    @contextmanager
    def borrow(self) -> Iterator[BlockBytes]:
        """Lend a buffer for the duration of a `with`. Any thread may call this."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = np.frombuffer(mmap.mmap(-1, self._size), np.uint8)
        try:
            yield buffer
        finally:
            self._free.append(buffer)


def _transfer(call: Callable[[int, list[memoryview], int], int], file: int, data: memoryview, offset: int) -> None:
    """Read or write all of `data`. A file that refuses direct I/O uses the page cache from then on."""
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
    return OSError(errno.ENODATA, "a segment is shorter than its slots")


def _allocate(file: int, offset: int, num_bytes: int) -> None:
    """Allocate room; if the disk is full, give back what was allocated."""
    try:
        os.posix_fallocate(file, offset, num_bytes)
    except OSError:
        os.ftruncate(file, offset)
        raise


def sync_folder(folder: Path) -> None:
    """Wait until the file names in a folder are on disk."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
