"""Compare loads and stores of the disk tier with plain direct I/O at the same places.

    python benchmarks/kv_disk.py --folder /path/on/the/disk

Plain reads and loads take turns on the same slots, in a new order each round; the table has medians. CPU time is that
of the process, without the kernel's work elsewhere. The parts are the steps of storing a block in host memory and on
disk, eight blocks at once.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from pypto_serving.store.base import Piece
from pypto_serving.store.checksum import digest
from pypto_serving.store.disk import DiskStore
from pypto_serving.store.host import HostStore
from pypto_serving.store.index import SlotTable
from pypto_serving.store.slab import SEGMENT_BYTES, Slab, stride_of
from pypto_serving.types.tier import ALIGNMENT
from pypto_serving.util import MonotonicClock

CLOCK = MonotonicClock()
SIZES = {"3.67 MB": 3_670_016, "256 KiB": 256 << 10}
THREADS = (1, 4, 8)
BATCH = 8
"""Blocks stored at once when the parts are measured."""
FINGERPRINT = b"benchmark"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="folder on the disk")
    parser.add_argument("--bytes", type=int, default=256 << 20, help="bytes of blocks in a set")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--entries", type=int, default=200_000, help="entries of the index to open")
    arguments = parser.parse_args()
    for name, size in SIZES.items():
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            measure_blocks(Path(folder), name, size, arguments.bytes // size, arguments.rounds)
    (name, size), *_ = SIZES.items()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        measure_parts(Path(folder), name, size, arguments.bytes // size)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        measure_opening(Path(folder), arguments.entries, arguments.rounds)


def make_pieces(size: int, count: int) -> list[Piece]:
    """Make blocks of random content in page-aligned memory."""
    stride = stride_of(size)
    memory = np.zeros(count * stride + ALIGNMENT, np.uint8)
    memory = memory[-memory.ctypes.data % ALIGNMENT :]
    memory[:] = np.resize(np.frombuffer(random.Random(0).randbytes(1 << 20), np.uint8), memory.size)
    rows = [memory[i * stride : i * stride + size] for i in range(count)]
    return [Piece(0, i, i.to_bytes(16, "little"), row) for i, row in enumerate(rows)]


def in_threads(pieces: Sequence[Piece], count: int, work: Callable[[Piece], None]) -> tuple[float, float]:
    """Return the seconds and CPU seconds that `count` threads take for all of `pieces`, interleaved."""

    def run(first: int) -> None:
        for piece in pieces[first::count]:
            work(piece)

    threads = [threading.Thread(target=run, args=(first,)) for first in range(count)]
    began_s, cpu_s = CLOCK.now(), time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return CLOCK.now() - began_s, time.process_time() - cpu_s


def measure_blocks(folder: Path, name: str, size: int, count: int, rounds: int) -> None:
    pieces = make_pieces(size, count)
    store = DiskStore(folder, FINGERPRINT, (size,), (count,), stride_of(size) * count)
    for batch in (1, 16):
        for case in ("first", "again"):
            if case == "first" and batch != 1:
                continue
            began_s, cpu_s = CLOCK.now(), time.process_time()
            for first in range(0, count, batch):
                assert all(store.store(pieces[first : first + batch]))
            spent_s, cpu_s = CLOCK.now() - began_s, time.process_time() - cpu_s
            print(
                f"{name}  store, {batch:2} at once, {case}  {count / spent_s:8.0f} blocks/s  "
                f"{count * size / spent_s / 2**20:6.0f} MiB/s  {cpu_s / count * 1e6:6.0f} us CPU per block"
            )
    (segment,) = folder.glob("*/g0-0000.slab")
    assert stride_of(size) * count <= SEGMENT_BYTES
    file = os.open(segment, os.O_RDONLY | os.O_DIRECT)

    def plain(piece: Piece) -> None:
        assert os.preadv(file, [piece.memory.data], piece.slot * stride_of(size)) == size

    def load(piece: Piece) -> None:
        assert store.load([piece]) == [True]

    for threads in THREADS:
        shares, found = [], []
        for round_ in range(rounds):
            order = random.Random(round_).sample(pieces, len(pieces))
            cases = [plain, load] if round_ % 2 == 0 else [load, plain]
            times = {case: in_threads(order, threads, case) for case in cases}
            shares.append(times[plain][0] / times[load][0])
            found.append((times[plain], times[load]))
        rates = [count * size / statistics.median(pair[i][0] for pair in found) / 2**20 for i in (0, 1)]
        cpu_us = [statistics.median(pair[i][1] for pair in found) / count * 1e6 for i in (0, 1)]
        share = f"{statistics.median(shares):6.1%}  ({min(shares):.0%} to {max(shares):.0%})"
        print(
            f"{name}  load, {threads} threads  {rates[1]:6.0f} MiB/s of {rates[0]:6.0f}  {share}  "
            f"{cpu_us[1]:5.0f} us CPU per block, plain {cpu_us[0]:5.0f}"
        )
    os.close(file)
    store.close()


def measure_parts(folder: Path, name: str, size: int, count: int) -> None:
    """Measure the CPU time per block of each part of storing blocks in host memory and on disk."""
    pieces = make_pieces(size, count)
    memory = os.memfd_create("parts")
    host = HostStore(memory, (size,), (count,))
    slab = Slab(folder, 0, size, count, writable=True)
    slab.grow(0, stride_of(size) * count)
    table = SlotTable(folder / "parts.index", 0, size, count, writable=True)

    def each(work: Callable[[Piece], object]) -> Callable[[Sequence[Piece]], object]:
        return lambda pieces: [work(piece) for piece in pieces]

    def record(pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            table.put(piece.slot, piece.key, bytes(16), 1)
        table.flush()

    def show(part: str, *works: Callable[[Sequence[Piece]], object]) -> None:
        spent_s = [0.0 for _ in works]
        for first in range(0, count, BATCH):
            for i, work in enumerate(works):
                began_s = time.thread_time()
                work(pieces[first : first + BATCH])
                spent_s[i] += time.thread_time() - began_s
        print(f"{name}  {part:40}", *(f"{spent / count * 1e6:6.0f}" for spent in spent_s), "us CPU per block")

    show("host: store, new slots", host.store)
    show("host: store, slots used before", host.store)
    parts = (
        each(lambda piece: slab.write(piece.slot, piece.memory)),
        lambda _: slab.sync(),
        record,
        lambda _: table.sync(),
    )
    show("disk: hash", each(lambda piece: digest(piece.key, piece.memory)))
    show("disk: write, wait, records, wait; new", *parts)
    show("disk: write, wait, records, wait", *parts)
    slab.close()
    table.close()
    store = DiskStore(folder, FINGERPRINT, (size,), (count,), stride_of(size) * count)
    show("disk: store, new slots", store.store)
    show("disk: store, slots used before", store.store)
    store.close()
    os.close(memory)


def measure_opening(folder: Path, entries: int, rounds: int) -> None:
    """Measure the time to open a store with a full table; its segments are holes, which nothing reads."""
    size = ALIGNMENT
    arguments = (folder, FINGERPRINT, (size,), (entries,), entries * size)
    DiskStore(*arguments).close()
    (table_path,) = folder.glob("*/g0.index")
    table = SlotTable(table_path, 0, size, entries, writable=True)
    stamps = random.Random(0).sample(range(1, entries + 1), entries)
    for slot, stamp in enumerate(stamps):
        table.put(slot, random.Random(slot).randbytes(16), bytes(16), stamp)
    table.flush()
    table.close()
    with (table_path.parent / "g0-0000.slab").open("wb") as segment:
        segment.truncate(entries * size)
    times = []
    for _ in range(rounds):
        began_s = CLOCK.now()
        store = DiskStore(*arguments)
        assert len(store.inventory().slots) == 4 * entries
        times.append(CLOCK.now() - began_s)
        store.close()
    print(f"open {entries} entries and list them  {statistics.median(times) * 1000:.0f} ms")


if __name__ == "__main__":
    main()
