"""Move blocks between device memory and the stores of lower tiers, in parallel with steps."""

from __future__ import annotations

import os
import select
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

from pypto_serving.backend.base import BlockMemory
from pypto_serving.ipc import SocketChannel
from pypto_serving.store.base import Piece, Store
from pypto_serving.threads import ending_loudly, start_thread
from pypto_serving.types.arrays import BlockBytes, unpack_ids
from pypto_serving.types.tier import KEY_BYTES, Tier, TransferDone, TransferJob, TransferReport, Transfers

LOAD_THREADS: dict[Tier, int] = {"host": 1, "disk": 4, "remote": 2}
"""Load threads per tier. Each tier has one more thread for stores."""


class Move(NamedTuple):
    """One block of a job: its id on the device, and its slot and key in a store."""

    group: int
    block: int
    slot: int
    key: bytes


class MovedPart(NamedTuple):
    """A part of a job: its begin and end, and which of its blocks were moved."""

    started_s: float
    ended_s: float
    worked: Sequence[bool]


class Mover:
    """Moves blocks between the device's memory and the stores."""

    def __init__(self, memory: BlockMemory, stores: Mapping[Tier, Store]) -> None:
        self.memory = memory
        self.stores = stores

    def moves(self, job: TransferJob) -> list[Move]:
        """Return the blocks of a job."""
        groups, blocks, slots = (unpack_ids(part).tolist() for part in (job.groups, job.blocks, job.slots))
        keys = [job.keys[i : i + KEY_BYTES] for i in range(0, len(job.keys), KEY_BYTES)]
        return [Move(*move) for move in zip(groups, blocks, slots, keys, strict=True)]

    def move(self, job: TransferJob, moves: Sequence[Move]) -> list[bool]:
        """Move some blocks of a job. Return, for each, whether this succeeded."""
        store = self.stores[job.tier]
        if job.kind == "find":
            return store.find([move.key for move in moves])
        if job.kind == "clear":
            store.clear()
            return []
        if job.kind == "store":
            return store.store(self._pieces(moves, self.memory.read_blocks))
        pieces = self._pieces(moves, self.memory.staging)
        worked = store.load(pieces)
        for group, picked in _by_group(moves).items():
            loaded = [i for i in picked if worked[i]]
            contents = [pieces[i].memory for i in loaded]
            self.memory.write_blocks(group, [moves[i].block for i in loaded], contents)
        return worked

    def _pieces(self, moves: Sequence[Move], memory_of: Callable[[int, list[int]], list[BlockBytes]]) -> list[Piece]:
        """Return the stores' description of blocks, in the order of `moves`."""
        found: dict[int, BlockBytes] = {}
        for group, picked in _by_group(moves).items():
            found.update(zip(picked, memory_of(group, [moves[i].block for i in picked]), strict=True))
        return [Piece(move.group, move.slot, move.key, found[i]) for i, move in enumerate(moves)]


def _by_group(moves: Sequence[Move]) -> dict[int, list[int]]:
    """Return the indices of moves by KV group."""
    found: dict[int, list[int]] = {}
    for i, move in enumerate(moves):
        found.setdefault(move.group, []).append(i)
    return found


class TransferServer:
    """Owns the threads of a worker's transfers. Receives jobs and sends reports over its own channel.

    One thread serves the channel. Each tier has LOAD_THREADS threads for loads and one for stores. Loads of a message
    wait until step `after_step` is done.
    """

    def __init__(self, channel: SocketChannel[Transfers], mover: Mover, epoch: int) -> None:
        self._channel = channel
        self._mover = mover
        self._epoch = epoch
        self._loaders = {tier: ThreadPoolExecutor(LOAD_THREADS[tier], f"load-{tier}") for tier in mover.stores}
        self._storers = {tier: ThreadPoolExecutor(1, f"store-{tier}") for tier in mover.stores}
        self._completed_step = 0
        self._waiting: deque[tuple[int, TransferJob]] = deque()
        self._running: list[tuple[TransferJob, list[Future[MovedPart]]]] = []
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._closing = False
        self._thread = start_thread("transfers", self._serve)

    @property
    def is_busy(self) -> bool:
        """Whether there are transfers that have not been reported yet."""
        return bool(self._waiting or self._running)

    def step_done(self, step_id: int) -> None:
        """Record a completed step and start loads that waited for it. The worker's main thread calls this."""
        self._completed_step = step_id
        if self._waiting:
            os.eventfd_write(self._wake, 1)

    def _serve(self) -> None:
        """Serve the channel, in a thread."""
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        while not self._closing and not self._channel.gone:
            poller.register(self._channel.socket, self._channel.events)
            if any(fd == self._wake for fd, _ in poller.poll()):
                os.eventfd_read(self._wake)
            while (message := self._channel.receive()) is not None:
                self._accept_jobs(message)
            while self._waiting and self._waiting[0][0] <= self._completed_step:
                self._start(self._waiting[0][1])
                self._waiting.popleft()  # only now, so that `is_busy` stays true in between
            self._report()

    def _accept_jobs(self, message: Transfers) -> None:
        for job in message.jobs:
            if job.kind == "load":
                self._waiting.append((message.after_step, job))
            else:
                self._start(job)

    def _start(self, job: TransferJob) -> None:
        """Let threads move the blocks of a job; a load is split into one part per thread."""
        pool = self._storers[job.tier] if job.kind in ("store", "clear") else self._loaders[job.tier]
        moves = self._mover.moves(job)
        num_parts = max(1, min(LOAD_THREADS[job.tier], len(moves))) if job.kind == "load" else 1
        bounds = [len(moves) * number // num_parts for number in range(num_parts + 1)]
        parts = [pool.submit(self._move, job, moves[begin:end]) for begin, end in pairwise(bounds)]
        for part in parts:
            part.add_done_callback(lambda _: os.eventfd_write(self._wake, 1))
        self._running.append((job, parts))

    def _move(self, job: TransferJob, moves: Sequence[Move]) -> MovedPart:
        with ending_loudly("a transfer"):  # with the worker, so that the core does not wait for it
            started_s = time.monotonic()
            worked = self._mover.move(job, moves)
            return MovedPart(started_s, time.monotonic(), worked)

    def _report(self) -> None:
        """Report the jobs whose parts have all ended."""
        running, done = [], []
        for job, parts in self._running:
            if all(part.done() for part in parts):
                done.append(self._result(job, [part.result() for part in parts]))
            else:
                running.append((job, parts))
        self._running = running
        if done:
            self._channel.send(TransferReport(self._epoch, done))
        self._channel.flush()

    def _result(self, job: TransferJob, parts: Sequence[MovedPart]) -> TransferDone:
        worked = bytes(ok for part in parts for ok in part.worked)
        elapsed_s = max(part.ended_s for part in parts) - min(part.started_s for part in parts)
        return TransferDone(job.job_id, worked, elapsed_s, self._mover.stores[job.tier].writable)

    def shut_down(self) -> None:
        """Finish running transfers, cancel the rest, and close the stores."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        for pool in (*self._loaders.values(), *self._storers.values()):
            pool.shutdown(cancel_futures=True)
        for store in self._mover.stores.values():
            store.close()
