"""The interface between the engine and a device: a Backend prepares one Program, and the Program runs steps.

Order in a worker: make the backend → `allocate()` the persistent I/O buffers → `prepare()` the program → open the
channel. Then, for each dispatch, `submit()` and, in the same order, `collect()`.

At most `limits.held_steps` steps are submitted and not collected, each in buffers of its own. A backend that splits
steps has two dispatches per step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from pypto_serving.types.arrays import Array, BlockBytes, Float32Array, Int32Array, UInt64Array
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.kv import KVCacheGroupSpec
from pypto_serving.types.sampler import LogitAdjustments, Logprobs, Sampler
from pypto_serving.types.step import BackendLimits


class BlockMemory(Protocol):
    """The KV blocks of a device. Threads use it during steps, but never for blocks that a step in flight writes."""

    block_bytes: tuple[int, ...]
    """Bytes of a block, per group."""

    def read_blocks(self, group: int, blocks: Sequence[int]) -> list[BlockBytes]:
        """Return the contents of blocks, in host memory."""

    def staging(self, group: int, blocks: Sequence[int]) -> list[BlockBytes]:
        """Return host memory for the new contents of blocks. Fill it, then call `write_blocks`."""

    def write_blocks(self, group: int, blocks: Sequence[int], contents: Sequence[BlockBytes]) -> None:
        """Write the filled `staging` memory to blocks."""


class HostBlocks:
    """Blocks in host memory, not copied: `arenas[g]`, uint8 [num_blocks, block_bytes]. Implements BlockMemory."""

    def __init__(self, arenas: Sequence[BlockBytes]) -> None:
        self.arenas = tuple(arenas)
        self.block_bytes = tuple(arena.shape[1] for arena in self.arenas)

    def read_blocks(self, group: int, blocks: Sequence[int]) -> list[BlockBytes]:
        """Return views of the blocks."""
        return [self.arenas[group][block] for block in blocks]

    def staging(self, group: int, blocks: Sequence[int]) -> list[BlockBytes]:
        """Return views of the blocks, into which loads write directly."""
        return self.read_blocks(group, blocks)

    def write_blocks(self, group: int, blocks: Sequence[int], contents: Sequence[BlockBytes]) -> None:
        """Do nothing: `contents` are views of the blocks."""


Progress = Callable[[str, int, int], None]
"""Reports progress while a program is prepared: progress(phase, done, total)."""

Zeros = Callable[..., Array]
"""Allocates an array of zeros: zeros(dtype, *shape)."""

Fault = Callable[[str, int], None]
"""Reports the error that ends this process: fault(message, exit_code)."""

DispatchKind = Literal["mixed", "prefill", "decode"]


def _zeros(dtype: Any, *shape: int) -> Array:
    return np.zeros(shape, dtype)


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """Persistent, padded input buffers of one dispatch, all int32: R rows, and T tokens with room for padding.

    R is max_num_seqs, or the largest number of rows that dispatches are padded to. `block_tables[g]` has shape
    [R, max blocks of group g per sequence], `slot_mapping[g]` shape [T].
    """

    token_ids: Int32Array
    positions: Int32Array
    query_start: Int32Array
    context_lens: Int32Array
    logits_rows: Int32Array
    slot_mapping: tuple[Int32Array, ...]
    block_tables: tuple[Int32Array, ...]
    rows: Int32Array
    num_drafts: Int32Array

    @classmethod
    def in_host_memory(
        cls, groups: tuple[KVCacheGroupSpec, ...], limits: BackendLimits, zeros: Zeros = _zeros
    ) -> StepBuffers:
        """Allocate zeroed buffers in ordinary host memory, or with `zeros`."""
        padded = max(limits.traits.padded_rows, default=0)
        rows = max(limits.max_num_seqs, padded)
        tokens = limits.max_num_batched_tokens + padded

        def room(*shape: int) -> Int32Array:
            return zeros(np.int32, *shape)

        return cls(
            token_ids=room(tokens),
            positions=room(tokens),
            query_start=room(rows + 1),
            context_lens=room(rows),
            logits_rows=room(rows * (1 + limits.traits.max_drafts) + limits.max_prompt_logprobs),
            slot_mapping=tuple(room(tokens) for _ in groups),
            block_tables=tuple(room(rows, g.table_blocks(limits.max_model_len)) for g in groups),
            rows=room(rows),
            num_drafts=room(rows),
        )


def _none() -> Int32Array:
    return np.empty(0, np.int32)


class StepInputs(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of one dispatch over r rows and t tokens, row after row. All arrays are int32 views.

    A struct, since each dispatch builds one: a frozen dataclass of 13 fields takes 2 to 5 us.

    token_ids, positions [t]: the tokens to compute and their absolute positions.
    query_start [r + 1]: row i owns tokens [query_start[i], query_start[i + 1]).
    context_lens [r]: tokens of row i after this step (last position + 1).
    slot_mapping[g] [t]: slot of each token in group g, block id * block_size + position % block_size, in source
        tokens; a tensor with ratio m writes row slot // m, for tokens with (position + 1) % m == 0 only.
    block_tables[g] [r, n]: block ids in order of position, as many as the row's tokens need. Further entries are
        undefined. 0 is the null block: padding may write to it, and it must never be read.
    logits_rows [s]: indices of the tokens whose logits are needed. First, in row order, the last token of each row that
        samples, and the `num_drafts` before it; then the prompt tokens whose successors are scored.
    fresh_blocks[g]: ids of newly allocated blocks, whose content is undefined.
    num_rows: live rows. A padded dispatch has r > num_rows. Each padding row computes token 0 at position 0 in the null
        block; its logits are not used.
    rows [r]: the worker's index of each row, constant while the request runs; -1 for padding.

    For programs that sample on the device:

    num_drafts [r]: how many of the row's last tokens are drafts to verify. A device that makes drafts fills in their
        ids.
    pending [k]: rows (indices into r) whose last step was not collected when this one was packed. The device replaces
        the row's first token by the last one that it sampled for the row. Positions, slots and lengths assume that all
        drafts in flight are accepted; the device decreases them by the number of rejected ones. If it sampled no token
        for the row, because the logits were not finite, it computes token 0 instead; the result is dropped.
    """

    token_ids: Int32Array
    positions: Int32Array
    query_start: Int32Array
    context_lens: Int32Array
    logits_rows: Int32Array
    slot_mapping: tuple[Int32Array, ...]
    block_tables: tuple[Int32Array, ...]
    fresh_blocks: tuple[Int32Array, ...]
    kind: DispatchKind = "mixed"
    num_rows: int = 0
    rows: Int32Array = msgspec.field(default_factory=_none)
    num_drafts: Int32Array = msgspec.field(default_factory=_none)
    pending: Int32Array = msgspec.field(default_factory=_none)


class SamplingInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters for a device, one entry for each of the n sampling rows of a dispatch, in row order.

    Log-probabilities are computed from the logits before any adjustment.

    owners [n]: the row, an index into the r rows of StepInputs.
    draws [n]: DRAWs; `random` belongs to position `positions[i]` and is the first number of
        Philox4x32-10(seed, choice, position), see `backend/numpy_sampler.py`. Each position has its own numbers.
    seeds, choices [n] uint64; positions [n]: absolute position of the first token to sample.
    num_logprobs [n]: return the token's log-probability and this many of the highest ones; -1 returns none.
    adjustments: None if no row has an adjustment.
    """

    owners: Int32Array
    draws: NDArray[np.void]
    seeds: UInt64Array
    choices: UInt64Array
    positions: Int32Array
    num_logprobs: Int32Array
    adjustments: LogitAdjustments | None


class SampledTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that a device sampled: `counts[i]` >= 1 for the i-th sampling row; `token_ids` concatenates all rows.

    A token is -1 if the row's logits are not finite. If any row asks for log-probabilities, `logprobs` covers all of
    `token_ids`, as wide as the largest `num_logprobs`.
    """

    counts: Int32Array
    token_ids: Int32Array
    logprobs: Logprobs | None = None


class StepOutput(msgspec.Struct, frozen=True):
    """The output of a dispatch: float32 `logits` [s, vocab], or `sampled` if the device samples.

    `logits` are valid until the next `submit`, or in a pipeline until the next `collect`.
    `virtual_s` is the step's time on a simulated device.
    """

    logits: Float32Array | None = None
    sampled: SampledTokens | None = None
    virtual_s: float | None = None


class Drafter(Protocol):
    """Proposes draft tokens, which the host verifies. Drafts change the speed, never the answer."""

    def start_row(self, row: int) -> None:
        """Forget everything about `row`, which now holds another request, or restarts the same one."""

    def propose(
        self, tokens: Int32Array, rows: Int32Array, known: Int32Array, most: Int32Array
    ) -> tuple[Int32Array, Float32Array]:
        """Write at most `most` [n] drafts after the `known` [n] tokens of `rows` [n], in `tokens` [R, max_model_len].

        Return, per row, the number of drafts, and the probability that a draft is right if all drafts before it are.
        Pass all rows that sample next, also with `most` 0: their new tokens show which earlier drafts were right. The
        caller verifies only the drafts that pay.
        """


class Draft(Protocol):
    """Predict the tokens after those of `inputs` with the draft layers of a model.

    Each row of `inputs` has one token: the token after the row's computed ones, or after its token in the last call.
    The row may not be in a dispatch in flight. Return float32 logits [r, vocab], valid until the next call or `submit`.
    """

    def __call__(self, inputs: StepInputs, /) -> Float32Array: ...


class Program(Protocol):
    """A prepared model on a device. Owns the weights and the KV memory."""

    groups: tuple[KVCacheGroupSpec, ...]
    num_blocks: tuple[int, ...]
    limits: BackendLimits
    fingerprint: bytes
    memory: BlockMemory
    sampler: Sampler | None
    """Samples tokens from the program's logits. None: the worker samples in numpy."""
    draft: Draft | None
    """Runs the draft layers. None: the program makes no drafts."""

    def submit(self, inputs: StepInputs, sampling: SamplingInputs | None) -> None:
        """Begin a dispatch: write the K/V of its tokens, compute logits of `inputs.logits_rows`, and sample if asked.

        The buffers that `inputs` views do not change until the dispatch is collected. `sampling` is given if the device
        samples.
        """

    def collect(self) -> StepOutput:
        """Wait for the oldest dispatch in flight and return its output."""


class Backend(ABC):
    """The factory of a Program for a device. Made once per worker life, with the resolved configuration."""

    descendants: tuple[int, ...] = ()
    """File descriptors inherited by all processes of the program, so that others notice when all have ended."""

    respawned = False
    """Whether this worker replaces another one, which may not have freed its resources yet: then wait for these."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    def allocate(self) -> Sequence[StepBuffers]:
        """Allocate `config.num_buffers` input buffers. A device backend returns shared or pinned memory."""
        config = self.config
        return [StepBuffers.in_host_memory(config.cache.groups, config.limits) for _ in range(config.num_buffers)]

    def pin_main_thread(self) -> None:  # noqa: B027 (most backends pin nothing)
        """Pin the calling thread to a CPU, if that helps. The main thread of a worker process calls this once."""

    def watch(self, fault: Fault) -> None:  # noqa: B027 (most programs are one process)
        """If a process that the program needs ends, report a fault and end this one. Must be called after `prepare`."""

    @abstractmethod
    def prepare(self, progress: Progress) -> Program:
        """Load weights, allocate the KV memory, and return the Program. Raises ModelError or ConfigError."""
