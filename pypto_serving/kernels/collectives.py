"""Shared memory of a host's ranks, steps published in it by a leader, and collectives for programs on the kernels."""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pypto_serving.errors import ConfigError
from pypto_serving.kernels.abi import loaded
from pypto_serving.kernels.engine import HUGE_PAGE_BYTES, MemoryPool, ask_for_huge_pages, zeros
from pypto_serving.kernels.links import Extent, Link, Links, Mirrored, Mirrors, RankBarrier, RanksGone, ReceiveThread
from pypto_serving.kernels.operands import StepRows
from pypto_serving.kernels.recording import Recording
from pypto_serving.parallel.topology import Rank
from pypto_serving.types.arrays import Array, Float32Array
from pypto_serving.util import ceil_div

_MOST_BYTES = 1 << 46
"""Size of the shared file. Only written pages take memory."""


class SharedMemory:
    """Owns one rank's mappings of a file in memory.

    Ranks that allocate the same arrays in the same order get the same memory. Each rank maps the file itself.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._end = 0
        self._pool = MemoryPool(self._map)

    @classmethod
    def create(cls) -> SharedMemory:
        """Make a file without any arrays. Children can inherit `fd`, which the caller must close.

        Raises ConfigError if the limit of file sizes is too low.
        """
        fd = os.memfd_create("pypto-ranks")
        try:
            os.ftruncate(fd, _MOST_BYTES)
        except OSError as error:
            os.close(fd)
            raise ConfigError(f"ranks cannot share memory ({error}); raise the limit `ulimit -f`") from None
        return cls(fd)

    def _map(self, size: int) -> NDArray[np.uint8]:
        memory = np.frombuffer(mmap.mmap(self.fd, size, offset=self._end), np.uint8)
        self._end += ceil_div(size, HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        ask_for_huge_pages(memory)
        return memory

    def zeros(self, dtype: Any, *shape: int) -> Array:
        """Allocate the next array, of zeros until a rank writes to it. Memory is committed when first written."""
        return self._pool.zeros(dtype, *shape)


class StepBoard:
    """Owns the memory in which a leader publishes steps to the other ranks."""

    def __init__(self, memory: SharedMemory) -> None:
        self._lib = loaded()
        self.memory = memory.zeros(np.uint8, self._lib.board_bytes())

    def publish(self, buffers: int, tokens: int, rows: int, logits: int) -> None:
        """Publish a step whose arrays lie in the buffers with index `buffers`."""
        self._lib.publish(self.memory, buffers, tokens, rows, logits)

    def close(self) -> None:
        """Make the waiting of other ranks return."""
        self._lib.close_counts(self.memory, 1)


class NativeCollectives:
    """Collectives of `rank` with all ranks: shared memory, and barriers within steps, of which `slots` are in flight.

    `links` lead to another host, if there is one; a step has at most `most_tokens`. Without `memory`, the rank is
    alone.
    """

    def __init__(
        self,
        rank: Rank | None = None,
        memory: SharedMemory | None = None,
        slots: int = 1,
        links: Links | None = None,
        most_tokens: int = 1,
    ) -> None:
        self._rank, self._memory, self._slots = rank or Rank(), memory, slots
        self._links, self._most_tokens = links or Links(), most_tokens
        self._logits: Float32Array | None = None
        self._ended = 0
        self._known: dict[int, Mirrored] = {}
        self._receive_threads: list[ReceiveThread] = []
        if memory is None:
            return
        topology = self._rank.topology
        sizes = (topology.pipeline, RankBarrier.num_bytes(topology.tensor))
        groups, self._ends, released = (memory.zeros(np.uint8, *sizes) for _ in range(3))
        stage, index = self._rank.stage, self._rank.tensor
        first, *others = (rank.tensor for rank in topology.on_host(self._rank.host) if rank.stage == stage)
        self._group = RankBarrier(groups[stage], index, range(first, first + 1 + len(others)))
        self._released = released[stage]
        self._release = RankBarrier(self._released, index if index == first else None, range(first, first + 1))
        self._last = RankBarrier(self._ends[-1], None)

    def zeros(self, dtype: Any, *shape: int) -> Array:
        """Allocate zeros that the ranks of the group read and write."""
        if self._memory is None:
            return zeros(dtype, *shape)
        mine: Array = self._memory.zeros(dtype, self._rank.topology.pipeline, *shape)[self._rank.stage]
        return mine

    def zeros_for_all(self, dtype: Any, *shape: int) -> Array:
        """Allocate zeros that the ranks of all stages read and write."""
        return zeros(dtype, *shape) if self._memory is None else self._memory.zeros(dtype, *shape)

    def barrier(self, step: Recording, *gathered: Array) -> None:
        """Record: wait for the other ranks of the group, then see their parts of the arrays `gathered`.

        This is an all-gather without copies, since ranks of one host write to shared memory. Each array has the same
        number of words for each token.
        """
        if self._links.exchange is None:
            self._barrier(step)
            return
        mirrors = Mirrors([self._mirrored(array, Extent.TOKENS, self._most_tokens) for array in gathered])
        self._barrier(step, (mirrors, mirrors))

    def copies(self, array: Array) -> list[Array]:
        """Return the buffer sent to the other host, if any; ranks that write all of `array` must write it, too."""
        if self._links.exchange is None:
            return []
        sent = self._mirrored(array, Extent.TOKENS, self._most_tokens).sent
        return [] if sent is None else [sent.view(array.dtype).reshape(array.shape)]

    def gather_logits(self, step: Recording, logits: Float32Array) -> None:
        """Record: let the leader see each rank's part of `logits` [rows, vocab]."""
        if self._links.exchange is None:
            self._barrier(step)
            return
        mirrors, none = Mirrors([self._mirrored(logits, Extent.LOGITS, len(logits))]), Mirrors([])
        self._barrier(step, (none, mirrors) if self._rank.leads else (mirrors, none))

    def _mirrored(self, array: Array, extent: Extent, most: int) -> Mirrored:
        """Return the Mirrored of an array, the same object at all barriers that gather the array."""
        address = int(array.ctypes.data)
        if address not in self._known:
            self._known[address] = Mirrored(array, extent, most)
        return self._known[address]

    def _barrier(self, step: Recording, exchanged: tuple[Mirrors, Mirrors] | None = None) -> None:
        topology = self._rank.topology
        if self._memory is None or topology.tensor == 1:
            return
        step.wait(self._group)
        if self._links.exchange is not None and exchanged is not None:
            step.exchange(self._links.exchange, *exchanged, self._released)
        if topology.hosts_split_layers:
            step.wait(self._release)

    def begin_stage(self, step: Recording, x: Float32Array) -> None:
        """Record: wait for the previous stage, and copy its x [tokens, ...]."""
        stage, topology = self._rank.stage, self._rank.topology
        if self._memory is None or topology.pipeline == 1:
            return
        self._passed = self._memory.zeros(np.float32, topology.pipeline - 1, self._slots, *x.shape)
        if stage:
            if self._links.rows is not None and self._rank.host == 1:
                self._deliver(self._links.rows, self._slots_of(self._passed[stage - 1], Extent.TOKENS), stage - 1)
            step.wait(RankBarrier(self._ends[stage - 1], None))
            step.pass_rows(self._passed[stage - 1], x, self._rank.tensor, topology.tensor)
            self.barrier(step, x)

    def end_stage(self, step: Recording, x: Float32Array, logits: Float32Array) -> None:
        """Record: pass x to the next stage or, in the last stage, `logits` [rows, vocab] to the leader."""
        stage, topology = self._rank.stage, self._rank.topology
        if self._memory is None or topology.pipeline == 1:
            return
        self._logits = self._memory.zeros(np.float32, self._slots, *logits.shape)
        if self._links.logits is not None and self._rank.leads:
            self._deliver(self._links.logits, self._slots_of(self._logits, Extent.LOGITS), topology.pipeline - 1)
        if self._rank.projects:
            self.hand_over(step, logits)
            return
        step.pass_rows(x, self._passed[stage], self._rank.tensor, topology.tensor)
        self.barrier(step)
        if self._links.rows is not None and self._rank.host == 0:
            step.send_slot(self._links.rows, self._slots_of(self._passed[stage], Extent.TOKENS), self._ends[-1])
        step.wait(RankBarrier(self._ends[stage], self._rank.tensor, range(0)))

    def hand_over(self, step: Recording, logits: Float32Array) -> None:
        """Record: pass `logits` [rows, vocab] of the last stage to the leader, unless the leader is in this stage.

        `end_stage` records this for a whole step. A step of the last stage alone must record it after `end_stage`.
        """
        if self._logits is None:
            return
        step.pass_rows(logits, self._logits, self._rank.tensor, self._rank.topology.tensor, StepRows.LOGITS)
        self.barrier(step)
        if self._links.logits is not None:
            step.send_slot(self._links.logits, self._slots_of(self._logits, Extent.LOGITS), self._ends[-1])
        step.wait(RankBarrier(self._ends[-1], self._rank.tensor, range(0)))

    def _slots_of(self, array: Float32Array, extent: Extent) -> Mirrors:
        """Return the arrays of each slot of an array [slots, rows, ...]."""
        return Mirrors([Mirrored(slot, extent, len(slot), known=False) for slot in array])

    def _deliver(self, link: Link, mirrors: Mirrors, stage: int) -> None:
        """Start a thread that receives the output of the other host's stage `stage`."""
        self._receive_threads.append(ReceiveThread(link, mirrors, self._slots, self._ends[stage]))

    def await_logits(self, logits: Float32Array, slot: int, number: int) -> Float32Array:
        """Wait until `number` steps have ended, and return the logits of `slot`. `logits`: the stage's own.

        Raises RanksGone if the barrier is closed.
        """
        if self._logits is None:
            return logits
        while self._ended < number:
            if not self._last.wait():
                raise RanksGone
            self._ended += 1
        mine: Float32Array = self._logits[slot]
        return mine
