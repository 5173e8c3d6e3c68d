"""The wire between the engine core and a worker: a row is described once, later plans carry differences.

All integer arrays are int32 bytes. A row is an index in [0, max_num_seqs) that the scheduler lends to a
request while it runs; a preempted request comes back as a new row with all of its tokens.
"""

from __future__ import annotations

import msgspec

from pypto_serving.types.kv import KVCacheGroupSpec
from pypto_serving.types.sampling import MAX_LOGPROBS, RowSampling
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

    A row that reaches its last known token samples the next one and appends it to itself. `num_drafts`, empty where
    there are none, allows `rows[i]` that many draft tokens on top; a row with k drafts appends 1 to k + 1 tokens.
    `new_blocks[g]` is a flat array of pairs (row, block id), appended to the rows' tables of group g in order.
    """

    step_id: int
    epoch: int
    rows: bytes
    num_tokens: bytes
    new_rows: list[NewRow]
    new_blocks: tuple[bytes, ...]
    drops: bytes
    num_drafts: bytes = b""
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


class RowFault(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Why `row` cannot go on: its request ends with a 500, after the tokens of the result; others are not affected."""

    row: int
    code: str
    message: str


class StepResult(msgspec.Struct, frozen=True, array_like=True, tag="result"):
    """What a plan produced. `elapsed_s` is the time inside the worker.

    `rows[i]` got `counts[i]` of `token_ids`, row after row; empty `counts` means one each. `logprobs` holds one entry
    for each token of a row that asks for them, in the order of `token_ids`. A row may get none: see `faults`.
    """

    step_id: int
    epoch: int
    rows: bytes
    token_ids: bytes
    logprobs: list[RowLogprobs]
    elapsed_s: float
    counts: bytes = b""
    faults: list[RowFault] = []


class BackendTraits(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Describe what the programs of a backend can do, beside their sizes. The engine acts on each of these.

    | trait             | meaning                                                                                |
    |-------------------|----------------------------------------------------------------------------------------|
    | mixed_steps       | one dispatch takes prompt chunks and decodes; else the worker splits a step in two     |
    | padded_rows       | row counts that decode dispatches are padded to, ascending; () leaves them as they are |
    | chunk_tokens      | a prompt chunk is a multiple of this, but for the last one of a prompt                 |
    | page_tokens       | source tokens in a block of every KV group; 0 takes any block sizes                    |
    | samples_on_device | the program chooses tokens and feeds them to its own next step                         |
    | max_logprobs      | top log-probabilities that it can return for a token; -1 returns none                  |
    | max_drafts        | draft tokens that it verifies for a row in one step                                    |
    """

    mixed_steps: bool = True
    padded_rows: tuple[int, ...] = ()
    chunk_tokens: int = 1
    page_tokens: int = 0
    samples_on_device: bool = False
    max_logprobs: int = MAX_LOGPROBS
    max_drafts: int = 0


class BackendLimits(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Bound what a program is asked for. `depth` is the number of steps that may be in flight at once."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    depth: int = 1
    traits: BackendTraits = BackendTraits()

    @property
    def held_steps(self) -> int:
        """Steps that the program holds at once: where the host samples, it must finish one before the next."""
        return self.depth if self.traits.samples_on_device else 1


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
