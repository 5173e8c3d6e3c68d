"""What ranks of a host share: memory, steps that a leader publishes, and the collectives of programs on the kernels."""

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
"""Size of the file. Only pages that are written take memory."""


class SharedMemory:
    """Owns one rank's mappings of a file in memory.

    Ranks that ask for the same arrays in the same order get the same memory. Each maps the file on its own.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._end = 0
        self._pool = MemoryPool(self._map)

    @classmethod
    def create(cls) -> SharedMemory:
        """Make a file without any arrays. Children can inherit `fd`, which is the caller's to close.

        Raises ConfigError where files must be smaller.
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
        """Allocate the next array: zeros, until a rank writes it. Memory is committed when first written."""
        return self._pool.zeros(dtype, *shape)


class StepBoard:
    """Owns the memory in which a leader publishes steps to the other ranks."""

    def __init__(self, memory: SharedMemory) -> None:
        self._lib = loaded()
        self.memory = memory.zeros(np.uint8, self._lib.board_bytes())

    def publish(self, buffers: int, tokens: int, rows: int, logits: int) -> None:
        """Publish a step whose arrays are those of `buffers`, an index."""
        self._lib.publish(self.memory, buffers, tokens, rows, logits)

    def close(self) -> None:
        """Let the other ranks return."""
        self._lib.close_counts(self.memory, 1)


class NativeCollectives:
    """What `rank` shares with all ranks of its host: memory, and barriers within steps, of which `slots` are in flight.

    Where there is another host, `links` lead there; a step has at most `most_tokens`. Without `memory` the rank is
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
        """Record: wait for the other ranks of the group, and see what each has written of the arrays `gathered`.

        That is an all-gather without copies: ranks of one host write to shared memory. Each array holds equally many
        words for each token.
        """
        if self._links.exchange is None:
            self._barrier(step)
            return
        mirrors = Mirrors([self._mirrored(array, Extent.TOKENS, self._most_tokens) for array in gathered])
        self._barrier(step, (mirrors, mirrors))

    def copies(self, array: Array) -> list[Array]:
        """Return what to write too if every rank writes all of `array`: the buffer that is sent to the other host."""
        if self._links.exchange is None:
            return []
        sent = self._mirrored(array, Extent.TOKENS, self._most_tokens).sent
        return [] if sent is None else [sent.view(array.dtype).reshape(array.shape)]

    def gather_logits(self, step: Recording, logits: Float32Array) -> None:
        """Record: let the leader see what each rank of the group has written of `logits` [rows, vocab]."""
        if self._links.exchange is None:
            self._barrier(step)
            return
        mirrors, none = Mirrors([self._mirrored(logits, Extent.LOGITS, len(logits))]), Mirrors([])
        self._barrier(step, (none, mirrors) if self._rank.leads else (mirrors, none))

    def _mirrored(self, array: Array, extent: Extent, most: int) -> Mirrored:
        """Return what the other host has of an array: one and the same at all barriers where it is gathered."""
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
        """Record: wait for the stage before, and take over its x [tokens, ...]."""
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
        """Record: hand x on to the next stage, or `logits` [rows, vocab] to the leader."""
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
        """Record: hand `logits` [rows, vocab] of the last stage to the leader, unless it is of the same stage.

        `end_stage` does so for a whole step. A step of the last stage alone calls this itself, after
        `end_stage`.
        """
        if self._logits is None:
            return
        step.pass_rows(logits, self._logits, self._rank.tensor, self._rank.topology.tensor, StepRows.LOGITS)
        self.barrier(step)
        if self._links.logits is not None:
            step.send_slot(self._links.logits, self._slots_of(self._logits, Extent.LOGITS), self._ends[-1])
        step.wait(RankBarrier(self._ends[-1], self._rank.tensor, range(0)))

    def _slots_of(self, array: Float32Array, extent: Extent) -> Mirrors:
        """Return an array [slots, rows, ...] as one for each slot."""
        return Mirrors([Mirrored(slot, extent, len(slot), known=False) for slot in array])

    def _deliver(self, link: Link, mirrors: Mirrors, stage: int) -> None:
        """Take what the other host hands on from its stage `stage`."""
        self._receive_threads.append(ReceiveThread(link, mirrors, self._slots, self._ends[stage]))

    def await_logits(self, logits: Float32Array, slot: int, number: int) -> Float32Array:
        """Wait until `number` steps have ended, and return the logits of `slot`. `logits` are those of the stage.

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
