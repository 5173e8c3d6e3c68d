"""The wire between the engine core and a worker: a row is described once, later plans carry differences.

All integer arrays are int32 bytes. A row is an index in [0, max_num_seqs) that the scheduler lends to a
request while it runs; a preempted request comes back as a new row with all of its tokens.
"""

from __future__ import annotations

import msgspec

from pypto_serving.types.kv import KVCacheGroupSpec
from pypto_serving.types.sampling import RowSampling
from pypto_serving.types.tier import TierInventory


class NewRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request that enters a worker: known tokens, how many are already computed, block ids per group.

    Entries of `blocks` that are 0 are null blocks: never read. Blocks from position `num_computed` on are fresh.
    """

    row: int
    token_ids: bytes
    prompt_len: int
    num_computed: int
    blocks: tuple[bytes, ...]
    sampling: RowSampling


class StepPlan(msgspec.Struct, frozen=True, array_like=True, tag="plan"):
    """One step: drop rows, add rows, append blocks, then compute `num_tokens[i]` tokens of `rows[i]`.

    A row whose last known token is computed samples one token and appends it to itself. `new_blocks[g]` is a
    flat array of pairs (row, block id), appended to the rows' tables of group g in order.
    """

    step_id: int
    epoch: int
    rows: bytes
    num_tokens: bytes
    new_rows: list[NewRow]
    new_blocks: tuple[bytes, ...]
    drops: bytes
    partition: int = 0


class StopWorker(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Ends the worker after the plans sent before it."""


ToWorker = StepPlan | StopWorker


class RowLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities of the token sampled for `row`; see TokenLogprobs."""

    row: int
    logprob: float
    rank: int
    top_ids: bytes = b""
    top_logprobs: bytes = b""


class StepResult(msgspec.Struct, frozen=True, array_like=True, tag="result"):
    """What a plan produced: `rows[i]` sampled `token_ids[i]`. `elapsed_s` is the time inside the worker."""

    step_id: int
    epoch: int
    rows: bytes
    token_ids: bytes
    logprobs: list[RowLogprobs]
    elapsed_s: float


class BackendLimits(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a program can do. `depth` is the number of steps that may be in flight at once."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    depth: int = 1
    mixed_steps: bool = True
    samples_on_device: bool = False


class WorkerHello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A worker's first message: what is true now that its program is prepared, and what its stores hold."""

    epoch: int
    pid: int
    groups: tuple[KVCacheGroupSpec, ...]
    num_blocks: tuple[int, ...]
    limits: BackendLimits
    fingerprint: bytes
    load_s: float
    partitions: int = 1
    tiers: tuple[TierInventory, ...] = ()


class WorkerBeat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """Sent once a second by an idle worker."""

    epoch: int


FromWorker = WorkerHello | StepResult | WorkerBeat
