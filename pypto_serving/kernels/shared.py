"""What ranks of one host share: memory, meetings within steps, and the steps themselves."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pypto_serving.errors import ConfigError
from pypto_serving.kernels.engine import HUGE_PAGE_BYTES, Pool, ask_for_huge_pages, zeros
from pypto_serving.kernels.library import library
from pypto_serving.kernels.meeting import Meeting, RanksGone
from pypto_serving.kernels.operands import Rows
from pypto_serving.kernels.recording import Recording, StepArrays
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
        self._pool = Pool(self._map)

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


class Peers:
    """What rank `rank` of a tensor group shares with all ranks of a pipeline: memory, and meetings within steps.

    The group is stage `stage` of the pipeline, which computes up to `slots` steps at once. Without `memory` the rank is
    alone.
    """

    def __init__(
        self,
        rank: int = 0,
        ranks: int = 1,
        memory: SharedMemory | None = None,
        stage: int = 0,
        stages: int = 1,
        slots: int = 1,
    ) -> None:
        self._memory, self._rank, self._ranks = memory, rank, ranks
        self._stage, self._stages, self._slots = stage, stages, slots
        self._group: Meeting | None = None
        self._logits: Float32Array | None = None
        if memory is not None:
            sizes = (stages, Meeting.num_bytes(ranks))
            groups, self._ends = memory.zeros(np.uint8, *sizes), memory.zeros(np.uint8, *sizes)
            self._group = Meeting(groups[stage], rank, ranks) if ranks > 1 else None
            self._last = Meeting(self._ends[-1], None, ranks)

    def zeros(self, dtype: Any, *shape: int) -> Array:
        """Allocate zeros that the ranks of the group read and write."""
        if self._memory is None:
            return zeros(dtype, *shape)
        mine: Array = self._memory.zeros(dtype, self._stages, *shape)[self._stage]
        return mine

    def zeros_for_all(self, dtype: Any, *shape: int) -> Array:
        """Allocate zeros that the ranks of all stages read and write."""
        return zeros(dtype, *shape) if self._memory is None else self._memory.zeros(dtype, *shape)

    def meet(self, step: Recording, *gathered: Array) -> None:
        """Record: wait for the other ranks of the group, and see what each has written of the arrays `gathered`."""
        if self._group is not None:
            step.meet(self._group)

    def begin_stage(self, step: Recording, x: Float32Array) -> None:
        """Record: wait for the stage before, and take over its x [tokens, ...]."""
        if self._memory is None or self._stages == 1:
            return
        self._passed = self._memory.zeros(np.float32, self._stages - 1, self._slots, *x.shape)
        if self._stage:
            step.meet(Meeting(self._ends[self._stage - 1], None, self._ranks))
            step.pass_rows(self._passed[self._stage - 1], x, self._rank, self._ranks)
            self.meet(step, x)

    def end_stage(self, step: Recording, x: Float32Array, logits: Float32Array) -> None:
        """Record: hand x on to the stage behind, or `logits` [rows, vocab] to the leader."""
        if self._memory is None or self._stages == 1:
            return
        self._logits = self._memory.zeros(np.float32, self._slots, *logits.shape)
        if self._stage < self._stages - 1:
            step.pass_rows(x, self._passed[self._stage], self._rank, self._ranks)
        else:
            step.pass_rows(logits, self._logits, self._rank, self._ranks, Rows.LOGITS)
        self.meet(step)
        step.meet(Meeting(self._ends[self._stage], self._rank, self._ranks, waits=False))

    def await_logits(self, logits: Float32Array, slot: int) -> Float32Array:
        """Wait for the oldest step in flight, that of `slot`, and return its logits. `logits` are those of the stage.

        Raises RanksGone if the meeting is closed.
        """
        if self._logits is None:
            return logits
        if not self._last.meet():
            raise RanksGone
        mine: Float32Array = self._logits[slot]
        return mine


class Board:
    """Owns the memory in which a leader publishes steps to the other ranks."""

    def __init__(self, memory: SharedMemory) -> None:
        lib = library()
        assert lib is not None
        self._lib, self._memory = lib, memory.zeros(np.uint8, lib.board_bytes())

    def publish(self, buffers: int, tokens: int, rows: int, logits: int) -> None:
        """Publish a step whose arrays are those of `buffers`, an index."""
        self._lib.publish(self._memory, buffers, tokens, rows, logits)

    def publish_last(self) -> None:
        """Publish that no step follows."""
        self._lib.publish_last(self._memory)

    def close(self) -> None:
        """Let the ranks that follow return."""
        self._lib.close_counts(self._memory, 1)

    def follow(self, step: Recording, buffers: Sequence[StepArrays]) -> bool:
        """Replay `step` for every step until the last; return False if a meeting or the board is closed."""
        return step.follow(self._memory, buffers)
