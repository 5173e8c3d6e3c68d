"""Measure what ranks pay to see each other's data: meetings in shared memory, beside gloo.

    python benchmarks/meet.py [--ranks 2] [--rounds 2000]

- gather: each rank writes its part of an array, and reads all of it. Gloo: all_gather_into_tensor.
- reduce: each rank writes an array, and sums those of all ranks in rank order. Gloo: all_reduce.

Every rank is a process of one thread. A round is timed by the first rank; every kind of round takes its turn, so that
all meet the same load of the machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from pypto_serving.kernels import Meeting, SharedMemory

SIZES = (4 << 10, 64 << 10, 1 << 20)
TURN = 100
"""Rounds of one kind in a row."""
Round = Callable[[], Any]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Ours:
    """Rounds over memory that ranks share. Arrays alternate: one is written while a slower rank reads the other."""

    def __init__(self, memory: SharedMemory, rank: int, ranks: int) -> None:
        self._memory, self._rank, self._ranks = memory, rank, ranks
        self._meeting = Meeting(memory.zeros(np.uint8, Meeting.num_bytes(ranks)), rank)

    def gather(self, size: int) -> Round:
        shared = [self._memory.zeros(np.float32, self._ranks, size // 4 // self._ranks) for _ in range(2)]
        source, found = np.ones_like(shared[0][0]), np.empty_like(shared[0])

        def run() -> None:
            shared[0][self._rank] = source
            self._meeting.meet()
            np.copyto(found, shared[0])
            shared.reverse()

        return run

    def reduce(self, size: int) -> Round:
        shared = [self._memory.zeros(np.float32, self._ranks, size // 4) for _ in range(2)]
        source, total = np.ones_like(shared[0][0]), np.empty_like(shared[0][0])

        def run() -> None:
            shared[0][self._rank] = source
            self._meeting.meet()
            np.add(shared[0][0], shared[0][1], out=total)
            for other in shared[0][2:]:
                np.add(total, other, out=total)
            shared.reverse()

        return run


class Gloo:
    """The same by torch.distributed, whose ranks talk over sockets."""

    def __init__(self, port: int, rank: int, ranks: int) -> None:
        import torch
        import torch.distributed as dist

        warnings.simplefilter("ignore", FutureWarning)
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
        self._torch, self._dist, self._ranks = torch, dist, ranks

    def gather(self, size: int) -> Round:
        found = self._torch.empty(size // 4)
        source = self._torch.ones(size // 4 // self._ranks)
        return lambda: self._dist.all_gather_into_tensor(found, source)

    def reduce(self, size: int) -> Round:
        values = self._torch.zeros(size // 4)
        return lambda: self._dist.all_reduce(values)


def measure(rank: int, ranks: int, rounds: int, fd: int, port: int, results: Any) -> None:
    """Run one rank; the first sends the microseconds of every round of each kind."""
    ways = {"ours": Ours(SharedMemory(fd), rank, ranks), "gloo": Gloo(port, rank, ranks)}
    kinds: dict[tuple[str, int, str], Round] = {}
    for size in SIZES:
        for kind in ("gather", "reduce"):
            for name, way in ways.items():
                kinds[kind, size, name] = getattr(way, kind)(size)
    times: dict[tuple[str, int, str], list[float]] = {key: [] for key in kinds}
    for _ in range(rounds // TURN):
        for key, run in kinds.items():
            for _ in range(TURN):
                began_s = time.perf_counter()
                run()
                times[key].append((time.perf_counter() - began_s) * 1e6)
    if rank == 0:
        results.send(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2000, help="of each kind")
    options = parser.parse_args()
    memory, port = SharedMemory.create(), free_port()
    receiving, sending = multiprocessing.Pipe(duplex=False)
    fork = multiprocessing.get_context("fork")
    common = (options.ranks, options.rounds, memory.fd, port, sending)
    children = [fork.Process(target=measure, args=(rank, *common)) for rank in range(options.ranks)]
    for child in children:
        child.start()
    times = receiving.recv()
    for child in children:
        child.join()
    load, cpus = os.getloadavg()[0], len(os.sched_getaffinity(0))
    print(f"{options.ranks} ranks on {cpus} CPUs, load {load:.1f}; microseconds: least / 10th percentile / median\n")
    print("| round | bytes | meeting | gloo |\n|---|---|---|---|")
    for kind, size in dict.fromkeys((kind, size) for kind, size, _ in times):
        told = (np.percentile(times[kind, size, name], [0, 10, 50]) for name in ("ours", "gloo"))
        columns = " | ".join(" / ".join(f"{value:.0f}" for value in values) for values in told)
        print(f"| {kind} | {size >> 10} KiB | {columns} |")


if __name__ == "__main__":
    main()
