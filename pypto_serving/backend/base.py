"""The seam between the engine and a device: a backend prepares one Program; a Program runs one step.

Order in a worker: make the backend → `allocate()` the persistent I/O buffers → `prepare()` the program → open the
channel. A program sees a step as StepInputs: views into those buffers, valid during one `run()`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pypto_serving.config import EngineConfig
from pypto_serving.types.arrays import Float32Array, Int32Array
from pypto_serving.types.draws import Sampler
from pypto_serving.types.kv import KVCacheGroupSpec
from pypto_serving.types.step import BackendLimits

Progress = Callable[[str, int, int], None]
"""Called with (phase, done, total) while a program is prepared."""


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """Persistent, padded input buffers; T = max_num_batched_tokens, R = max_num_seqs, all int32.

    `block_tables[g]` has shape [R, max blocks of group g per sequence], `slot_mapping[g]` shape [T].
    """

    token_ids: Int32Array
    positions: Int32Array
    query_start: Int32Array
    context_lens: Int32Array
    logits_rows: Int32Array
    slot_mapping: tuple[Int32Array, ...]
    block_tables: tuple[Int32Array, ...]

    @classmethod
    def in_host_memory(cls, groups: tuple[KVCacheGroupSpec, ...], limits: BackendLimits) -> StepBuffers:
        """Zeroed buffers in ordinary memory."""
        tokens, rows = limits.max_num_batched_tokens, limits.max_num_seqs

        def zeros(*shape: int) -> Int32Array:
            return np.zeros(shape, dtype=np.int32)

        return cls(
            token_ids=zeros(tokens),
            positions=zeros(tokens),
            query_start=zeros(rows + 1),
            context_lens=zeros(rows),
            logits_rows=zeros(rows),
            slot_mapping=tuple(zeros(tokens) for _ in groups),
            block_tables=tuple(zeros(rows, -(-limits.max_model_len // g.block_size)) for g in groups),
        )


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step over r rows and t tokens, rows packed one after the other. All arrays are int32 views.

    token_ids, positions [t]: the tokens to compute and their absolute positions.
    query_start [r + 1]: row i owns tokens [query_start[i], query_start[i + 1]).
    context_lens [r]: tokens of row i after this step (last position + 1).
    slot_mapping[g] [t]: slot of each token in group g, block id * block_size + position % block_size, in source
        tokens; a tensor with ratio m writes row slot // m, for tokens with (position + 1) % m == 0 only.
    block_tables[g] [r, n]: block ids in order of position, as many as the row's tokens need; what stands behind them is
        left over from other rows. 0 is the null block, which may be written by padding and must never be read.
    logits_rows [s]: indices into the t tokens whose logits are wanted, at most one per row, in row order.
    fresh_blocks[g]: block ids handed out for this step whose old content is void.
    """

    token_ids: Int32Array
    positions: Int32Array
    query_start: Int32Array
    context_lens: Int32Array
    logits_rows: Int32Array
    slot_mapping: tuple[Int32Array, ...]
    block_tables: tuple[Int32Array, ...]
    fresh_blocks: tuple[Int32Array, ...]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Either float32 `logits` [s, vocab], or, where the device samples, int32 `token_ids` [s].

    `virtual_s` is the time that a simulated device says the step took.
    """

    logits: Float32Array | None = None
    token_ids: Int32Array | None = None
    virtual_s: float | None = None


class Program(Protocol):
    """A prepared model on a device: owns the weights and the KV arenas."""

    groups: tuple[KVCacheGroupSpec, ...]
    num_blocks: tuple[int, ...]
    limits: BackendLimits
    fingerprint: bytes
    arenas: tuple[NDArray[np.uint8], ...]
    """The KV pages of each group, uint8 [num_blocks, block_bytes]: all layers of a block lie together."""
    sampler: Sampler | None
    """Chooses tokens from the program's logits; without it, the worker does in numpy."""

    def run(self, inputs: StepInputs) -> StepOutput:
        """Compute one step: write the K/V of its tokens, then return logits of `inputs.logits_rows`."""


class Backend(ABC):
    """Makes a Program for a device. Constructed once per worker life with the resolved configuration."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    def allocate(self) -> StepBuffers:
        """The step's input buffers; a device backend returns shared or pinned memory."""
        return StepBuffers.in_host_memory(self.config.groups, self.config.limits)

    def pin_main_thread(self) -> None:  # noqa: B027 (most have nothing to do)
        """Called once by a worker process, whose main thread runs the prepared program and nothing else."""

    @abstractmethod
    def prepare(self, progress: Progress) -> Any:
        """Load weights, allocate the KV arenas, and return the Program. Raises ModelError or ConfigError."""
