"""What ranks of one host share: memory, and the steps that a leader publishes."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pypto_serving.errors import ConfigError
from pypto_serving.kernels.engine import HUGE_PAGE_BYTES, MemoryPool, ask_for_huge_pages
from pypto_serving.kernels.library import library
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
        lib = library()
        assert lib is not None
        self._lib, self.memory = lib, memory.zeros(np.uint8, lib.board_bytes())

    def publish(self, buffers: int, tokens: int, rows: int, logits: int) -> None:
        """Publish a step whose arrays are those of `buffers`, an index."""
        self._lib.publish(self.memory, buffers, tokens, rows, logits)

    def close(self) -> None:
        """Let the other ranks return."""
        self._lib.close_counts(self.memory, 1)

    def replay_published(
        self, step: Recording, buffers: Sequence[StepArrays], drafting: Recording | None = None
    ) -> None:
        """Replay `step` for every step that is published, until a barrier or the board is closed.

        With `drafting`, that is replayed for steps in the last of `buffers`.
        """
        step.replay_published(self.memory, buffers, drafting)
