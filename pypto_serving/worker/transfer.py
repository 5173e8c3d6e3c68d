"""Move blocks between device memory and the stores of lower tiers, in parallel with steps."""

from __future__ import annotations

import logging
import math
import os
import select
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

from pypto_serving.backend.base import BlockMemory
from pypto_serving.errors import EXIT_ENGINE, PyptoError
from pypto_serving.ipc import SocketChannel
from pypto_serving.store.base import Piece, Store
from pypto_serving.types.arrays import BlockBytes, unpack_ids
from pypto_serving.types.tier import KEY_BYTES, Tier, TransferDone, TransferJob, TransferReport, Transfers

log = logging.getLogger(__name__)

LOAD_THREADS: dict[Tier, int] = {"host": 1, "disk": 4, "remote": 2}
"""Load threads per tier. Each tier has one more thread for stores."""


class Move(NamedTuple):
    """One block of a job: its id on the device, and its slot and key in a store."""

    group: int
    block: int
    slot: int
    key: bytes


class Mover:
    """Moves blocks between the device's memory and the stores."""

    def __init__(self, memory: BlockMemory, stores: Mapping[Tier, Store]) -> None:
        self.memory = memory
        self.stores = stores

    def moves(self, job: TransferJob) -> list[Move]:
        """List the blocks of a job."""
        groups, blocks, slots = (unpack_ids(part).tolist() for part in (job.groups, job.blocks, job.slots))
        keys = [job.keys[i : i + KEY_BYTES] for i in range(0, len(job.keys), KEY_BYTES)]
        return [Move(*move) for move in zip(groups, blocks, slots, keys, strict=True)]

    def move(self, job: TransferJob, moves: Sequence[Move]) -> list[bool]:
        """Move some blocks of a job. Return for each whether it succeeded."""
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


class RunningJob:
    """A transfer job in parts, which threads run in any order. Changed under `lock`."""

    def __init__(self, job: TransferJob, moves: Sequence[Move], num_parts: int) -> None:
        self.job = job
        self.moves = moves
        self.num_parts = max(1, min(num_parts, len(moves)))
        self.done = bytearray(len(moves))
        self.started_s = math.inf
        self.lock = threading.Lock()
        self._left = self.num_parts

    def part(self, number: int) -> slice:
        """Return the range of moves in part `number`."""
        size = len(self.moves)
        return slice(size * number // self.num_parts, size * (number + 1) // self.num_parts)

    def begin(self) -> None:
        """Record the start of the job's first part."""
        with self.lock:
            self.started_s = min(self.started_s, time.monotonic())

    def finish(self, part: slice, worked: Sequence[bool], writable: bool) -> TransferDone | None:
        """Record the result of a part. Return the job's result after the last part, else None."""
        with self.lock:
            self.done[part] = bytes(worked)
            self._left -= 1
            if self._left:
                return None
        return TransferDone(self.job.job_id, bytes(self.done), time.monotonic() - self.started_s, writable)


@contextmanager
def ends_process() -> Iterator[None]:
    """End the worker at any exception, as in a step, so that the core never waits for a transfer in vain."""
    try:
        yield
    except PyptoError as error:
        log.error("a transfer failed: %s", error)
        os._exit(error.exit_code)
    except BaseException:
        traceback.print_exc()
        os._exit(EXIT_ENGINE)


class TransferServer:
    """Owns the threads of a worker's transfers. Receives jobs and sends reports over a channel of its own.

    One thread serves the channel. Each tier has LOAD_THREADS for loads and one for stores. Loads of a message wait
    until step `after_step` is done.
    """

    def __init__(self, channel: SocketChannel[Transfers], mover: Mover, epoch: int) -> None:
        self._channel = channel
        self._mover = mover
        self._epoch = epoch
        self._loaders = {tier: ThreadPoolExecutor(LOAD_THREADS[tier], f"load-{tier}") for tier in mover.stores}
        self._storers = {tier: ThreadPoolExecutor(1, f"store-{tier}") for tier in mover.stores}
        self._completed_step = 0
        self._waiting: deque[tuple[int, TransferJob]] = deque()
        self._done: deque[TransferDone] = deque()
        self._num_jobs = 0
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="transfers", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether there are transfers that were not reported yet."""
        return self._num_jobs > 0

    def step_done(self, step_id: int) -> None:
        """Record a completed step and start loads that waited for it. The worker's main thread calls this."""
        self._completed_step = step_id
        if self._waiting:
            os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        """Run the thread that serves the channel."""
        with ends_process():
            self._serve()

    def _serve(self) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        while not self._closing and not self._channel.gone:
            poller.register(self._channel.socket, self._channel.events)
            if any(fd == self._wake for fd, _ in poller.poll()):
                os.eventfd_read(self._wake)
            while (message := self._channel.receive()) is not None:
                self._accept_jobs(message)
            while self._waiting and self._waiting[0][0] <= self._completed_step:
                self._start(self._waiting.popleft()[1])
            self._report()

    def _accept_jobs(self, message: Transfers) -> None:
        self._num_jobs += len(message.jobs)
        for job in message.jobs:
            if job.kind == "load":
                self._waiting.append((message.after_step, job))
            else:
                self._start(job)

    def _start(self, job: TransferJob) -> None:
        loads = job.kind == "load"
        running = RunningJob(job, self._mover.moves(job), LOAD_THREADS[job.tier] if loads else 1)
        pool = self._storers[job.tier] if job.kind in ("store", "clear") else self._loaders[job.tier]
        for number in range(running.num_parts):
            pool.submit(self._do, running, running.part(number))

    def _do(self, running: RunningJob, part: slice) -> None:
        with ends_process():
            running.begin()
            worked = self._mover.move(running.job, running.moves[part])
            done = running.finish(part, worked, self._mover.stores[running.job.tier].writable)
            if done is not None:
                self._done.append(done)
                os.eventfd_write(self._wake, 1)

    def _report(self) -> None:
        done = []
        while self._done:
            done.append(self._done.popleft())
        self._num_jobs -= len(done)
        if done:
            self._channel.send(TransferReport(self._epoch, done))
        self._channel.flush()

    def shut_down(self) -> None:
        """Finish running transfers, cancel the rest, and close the stores."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        for pool in (*self._loaders.values(), *self._storers.values()):
            pool.shutdown(cancel_futures=True)
        for store in self._mover.stores.values():
            store.close()
