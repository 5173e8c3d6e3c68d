"""What ranks of one host share: memory, meetings within steps, and the steps themselves."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pypto_serving.kernels.engine import HUGE_PAGE_BYTES, Pool, ask_for_huge_pages, zeros
from pypto_serving.kernels.library import library
from pypto_serving.kernels.meeting import Meeting
from pypto_serving.kernels.recording import Recording, StepArrays
from pypto_serving.types.arrays import Array
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
        """Make a file without any arrays. Children can inherit `fd`, which is the caller's to close."""
        fd = os.memfd_create("pypto-ranks")
        os.ftruncate(fd, _MOST_BYTES)
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

    The group is stage `stage` of the pipeline. Without `memory` the rank is alone.
    """

    def __init__(
        self, rank: int = 0, ranks: int = 1, memory: SharedMemory | None = None, stage: int = 0, stages: int = 1
    ) -> None:
        self._memory, self._stage, self._stages = memory, stage, stages
        self._group: Meeting | None = None
        self._all: Meeting | None = None
        if memory is not None:
            groups = memory.zeros(np.uint8, stages, Meeting.num_bytes(ranks))
            every = memory.zeros(np.uint8, Meeting.num_bytes(ranks * stages))
            self._group = Meeting(groups[stage], rank, ranks) if ranks > 1 else None
            self._all = Meeting(every, stage * ranks + rank, ranks * stages) if stages > 1 else None

    def zeros(self, dtype: Any, *shape: int) -> Array:
        """Allocate zeros that all ranks read and write."""
        return zeros(dtype, *shape) if self._memory is None else self._memory.zeros(dtype, *shape)

    def meet(self, step: Recording, *gathered: Array) -> None:
        """Record: wait for the other ranks of the group, and see what each has written of the arrays `gathered`."""
        if self._group is not None:
            step.meet(self._group)

    def begin_stage(self, step: Recording) -> None:
        """Record: wait for the stages before, and see all that they have written."""
        for _ in range(self._stage):
            self._cross(step)

    def end_stage(self, step: Recording) -> None:
        """Record: wait for the stages behind, and see all that they have written."""
        for _ in range(self._stage, self._stages):
            self._cross(step)

    def _cross(self, step: Recording) -> None:
        if self._all is not None:
            step.meet(self._all)


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
