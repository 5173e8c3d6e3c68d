"""Calls of a store, one after another, that a process may be killed in: run by tests.store.test_kills.

    python -m tests.store.workload FOLDER KIND

A process is forked for each point at which a system call may change the disk, killed there, and leaves its folder and
what it was answered. Calls that write are also killed half-way, between two sectors.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from pypto_serving.store.base import Store
from pypto_serving.store.disk import DiskStore
from pypto_serving.store.files import FileStore
from tests.store.blocks import BLOCK_BYTES, FINGERPRINT, NUM_SLOTS, Place, key_of, listed, loads, put

CHANGES = (
    "fdatasync",
    "fsync",
    "ftruncate",
    "mkdir",
    "posix_fallocate",
    "pwrite",
    "pwritev",
    "rename",
    "truncate",
    "unlink",
    "utime",
)
CALLS: list[list[dict[Place, str]]] = [
    [{(0, 0): "a", (1, 0): "b"}, {(0, 1): "c"}],
    [{(0, 1): "d", (0, 2): "e", (1, 0): "f"}, {(0, 0): "g", (1, 1): "a2"}, {(0, 5): "h", (0, 1): "d"}],
    [{(0, slot): f"i{slot}" for slot in range(6)}],
]
"""Blocks to store, call by call, in each of several lives."""
KINDS = ("slots", "files")
SECTOR = 512
"""Bytes that a disk writes whole or not at all."""
KILLED = -signal.SIGKILL


def open_store(kind: str, root: Path) -> Store:
    if kind == "files":
        return FileStore(root, FINGERPRINT, BLOCK_BYTES, NUM_SLOTS)
    return DiskStore(root, FINGERPRINT, BLOCK_BYTES, NUM_SLOTS, 1 << 30)


def run(kind: str, root: Path, note: Callable[[str, dict[Place, str], list[bool]], None]) -> None:
    """All calls; `note` is told before and after each, and what each life begins with."""
    names = {key_of(name): name for life in CALLS for held in life for name in held.values()}
    for life in CALLS:
        store = open_store(kind, root)
        note("open", {place: names[key] for place, key in listed(store).items()}, [])
        for held in life:
            note("begin", held, [])
            note("end", held, put(store, {place: key_of(name) for place, name in held.items()}))
            loads(store, (0, 0), key_of("a"))
        store.close()


class Fuse:
    """Stands before system calls, and kills the process at the one after `left` others."""

    def __init__(self, left: int, half: bool) -> None:
        self.left, self._half = left, half
        for name in CHANGES:
            setattr(os, name, self._before(name, getattr(os, name)))

    def _before(self, name: str, call: Any) -> Any:
        def counted(*arguments: Any, **options: Any) -> Any:
            if self.left == 0:
                if self._half and name in ("pwrite", "pwritev"):
                    file, data, offset = arguments
                    data = bytes(data if name == "pwrite" else b"".join(data))
                    end = (offset + len(data) // 2) // SECTOR * SECTOR
                    path = Path(f"/proc/self/fd/{file}").readlink()  # opened anew, since the half may not be aligned
                    with path.open("r+b", buffering=0) as opened:
                        opened.seek(offset)
                        opened.write(data[: max(0, end - offset)])
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1
            return call(*arguments, **options)

        return counted


def run_with_fuse(kind: str, folder: Path, left: int, half: bool) -> None:
    with (folder / "answers").open("wb", buffering=0) as answers:

        def note(event: str, held: dict[Place, str], stored: list[bool]) -> None:
            answers.write(msgspec.json.encode([event, list(held.items()), stored]) + b"\n")

        Fuse(left, half)
        run(kind, folder / "kv", note)


def main(root: str, kind: str) -> None:
    for half in (False, True):
        left, status = 0, KILLED
        while status == KILLED:
            folder = Path(root) / f"{kind}-{left}-{half}"
            folder.mkdir()
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    run_with_fuse(kind, folder, left, half)
                    code = 0
                finally:
                    os._exit(code)
            status, left = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), left + 1
        if status:
            sys.exit(f"the run without a kill ended with {status}")


if __name__ == "__main__":
    main(*sys.argv[1:])
