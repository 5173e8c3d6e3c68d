"""Measure what ranks pay to see each other's data in shared memory, beside gloo.

    python benchmarks/collectives.py [--rounds 2000]

- gather: each rank writes its part of an array, and reads all of it. Gloo: all_gather_into_tensor.
- reduce: each rank writes an array, and sums those of both ranks. Gloo: all_reduce.

Each of two ranks is a process of one thread. The first one times the rounds; every kind of round takes its turn, so
that all meet the same load of the machine.
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
from rounds import head, row

from pypto_serving.kernels import RankBarrier, SharedMemory

RANKS = 2
SIZES = (4 << 10, 64 << 10, 1 << 20)
TURN = 100
"""Rounds of one kind in a row."""
Round = Callable[[], Any]
Kind = tuple[str, int, str]


def in_shared_memory(memory: SharedMemory, rank: int) -> dict[Kind, Round]:
    """Return rounds in shared memory. Arrays alternate: one is written while a slower rank reads the other."""
    barrier = RankBarrier(memory.zeros(np.uint8, RankBarrier.num_bytes(RANKS)), rank)

    def round_of(numbers: int, read: Callable[[Any, Any], object], out: Any) -> Round:
        shared = [memory.zeros(np.float32, RANKS, numbers) for _ in range(2)]
        source = np.ones(numbers, np.float32)

        def run() -> None:
            shared[0][rank] = source
            barrier.wait()
            read(shared[0], out)
            shared.reverse()

        return run

    kinds: dict[Kind, Round] = {}
    for size in SIZES:
        numbers = size // 4
        gathered, total = np.empty((RANKS, numbers // RANKS), np.float32), np.empty(numbers, np.float32)
        copy = round_of(numbers // RANKS, lambda found, out: np.copyto(out, found), gathered)
        add = round_of(numbers, lambda found, out: np.add(found[0], found[1], out=out), total)
        kinds |= {("gather", size, "ours"): copy, ("reduce", size, "ours"): add}
    return kinds


def in_gloo(port: int, rank: int) -> dict[Kind, Round]:
    """Return the same rounds by torch.distributed, whose ranks talk over sockets."""
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    kinds: dict[Kind, Round] = {}
    for size in SIZES:
        found, part, values = (torch.zeros(count) for count in (size // 4, size // 4 // RANKS, size // 4))
        kinds["gather", size, "gloo"] = lambda found=found, part=part: dist.all_gather_into_tensor(found, part)
        kinds["reduce", size, "gloo"] = lambda values=values: dist.all_reduce(values)
    return kinds


def measure(rank: int, rounds: int, fd: int, port: int, results: Any) -> None:
    """Run one rank; the first sends the microseconds of every round of each kind."""
    kinds = in_shared_memory(SharedMemory(fd), rank) | in_gloo(port, rank)
    times: dict[Kind, list[float]] = {key: [] for key in kinds}
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
    parser.add_argument("--rounds", type=int, default=2000, help="of each kind")
    rounds, memory = parser.parse_args().rounds, SharedMemory.create()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    receiving, sending = multiprocessing.Pipe(duplex=False)
    fork = multiprocessing.get_context("fork")
    children = [fork.Process(target=measure, args=(rank, rounds, memory.fd, port, sending)) for rank in range(RANKS)]
    for child in children:
        child.start()
    times = receiving.recv()
    for child in children:
        child.join()
    print(f"load {os.getloadavg()[0]:.1f}; microseconds: minimum / 10th percentile / median\n")
    print(head("round", "bytes", "shared memory", "gloo"))
    for kind, size in [(kind, size) for size in SIZES for kind in ("gather", "reduce")]:
        found = (np.percentile(times[kind, size, name], [0, 10, 50]) for name in ("ours", "gloo"))
        print(row(kind, f"{size >> 10} KiB", *(" / ".join(f"{value:.0f}" for value in values) for values in found)))


if __name__ == "__main__":
    main()
