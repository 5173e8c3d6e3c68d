"""Messages between the engine core and a worker. A row is described once; later plans carry only differences.

Integer arrays are int32 bytes. A row is an index in [0, max_num_seqs) that the scheduler lends to a running request. A
preempted request resumes as a new row with all of its tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from pypto_serving.errors import ConfigError
from pypto_serving.types.kv import KVCacheGroupSpec
from pypto_serving.types.sampling import MAX_LOGPROBS, RowSampling
from pypto_serving.types.tier import TierInventory

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural log-probabilities of one output token, before temperature and filters.

    `top_ids` (int32) and `top_logprobs` (float32) are the most likely tokens, best first.
    """

    logprob: float
    rank: int
    top_ids: bytes = b""
    top_logprobs: bytes = b""


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural log-probabilities of n consecutive prompt tokens and of the k most likely tokens at their positions.

    Little-endian bytes: `values` float32 [n] and `ranks` int32 [n] of the prompt's own tokens; `top_ids` int32 [n, k]
    and `top_values` float32 [n, k], best first.
    """

    values: bytes
    ranks: bytes
    top_ids: bytes = b""
    top_values: bytes = b""

    @property
    def num_tokens(self) -> int:
        return len(self.values) // 4


class NewRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request that starts on a worker: its known tokens, the number of computed ones, and block ids per group.

    Block id 0 is the null block, which is never read. Blocks from position `num_computed` on are fresh.
    `log_id` is the request's id in logs.
    """

    row: int
    token_ids: bytes
    prompt_len: int
    num_computed: int
    blocks: tuple[bytes, ...]
    sampling: RowSampling
    log_id: str = ""


class StepPlan(msgspec.Struct, frozen=True, array_like=True, tag="plan"):
    """One step: drop rows, add rows, append blocks, then compute `num_tokens[i]` tokens of `rows[i]`.

    - A row that reaches its last known token samples the next one and appends it.
    - `num_drafts[i]`: limit of draft tokens of `rows[i]`; empty if no row has any. A row with k drafts appends 1 to
      k + 1 tokens.
    - `new_blocks[g]` is a flat array of pairs (row, block id), appended in order to the rows' tables of group g.
    """

    step_id: int
    epoch: int
    rows: bytes
    num_tokens: bytes
    new_rows: list[NewRow]
    new_blocks: tuple[bytes, ...]
    drops: bytes
    num_drafts: bytes = b""


class StopWorker(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Ends the worker after the plans sent before it."""


ToWorker = StepPlan | StopWorker


class RowLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities of the token sampled for `row`."""

    row: int
    logprobs: TokenLogprobs


class RowPromptLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities of the next prompt tokens of `row`, after the ones delivered before."""

    row: int
    logprobs: PromptLogprobs


NOT_FINITE = "not_finite"
"""Code of a RowFault: the logits are not finite, so the row's KV may not be, either."""


class RowFault(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A fault of `row`. After the tokens of the result, its request ends with `status`; no other is affected.

    `param`: the request's field at fault, if any.
    """

    row: int
    code: str
    message: str
    status: int = 500
    param: str | None = None


class StepResult(msgspec.Struct, frozen=True, array_like=True, tag="result"):
    """The result of a plan. `elapsed_s` is the time inside the worker; packing and sampling are parts of it.

    `rows[i]` appended `counts[i]` of `token_ids`, row after row; empty `counts` means one each. A row in `faults` may
    have none. A row with a guide may have more than it sampled, or none; then its last token is computed again.
    `logprobs` has one entry per token of the rows that ask for them, in the order of `token_ids`; `prompt_logprobs` one
    per row with more of them. `num_drafts[i]`: verified drafts of `rows[i]`; `num_accepted[i]`: accepted ones among
    its tokens; both are empty if no row had drafts.
    """

    step_id: int
    epoch: int
    rows: bytes
    token_ids: bytes
    logprobs: list[RowLogprobs]
    elapsed_s: float
    counts: bytes = b""
    faults: list[RowFault] = []
    prompt_logprobs: list[RowPromptLogprobs] = []
    num_drafts: bytes = b""
    num_accepted: bytes = b""
    packing_s: float = 0.0
    sampling_s: float = 0.0


_Counts = TypeVar("_Counts", int, "NDArray[np.int32]")


def num_taken_back(num_drafts: _Counts, num_accepted: _Counts, num_appended: _Counts) -> _Counts:
    """Return how many planned tokens of a row, including drafts, do not count as computed.

    These are its rejected drafts. A row that appended no token also computes its last token again. The scheduler calls
    this for one row, the worker for arrays of rows, so that both agree.
    """
    taken_back: _Counts = num_drafts - num_accepted + (num_appended == 0)
    return taken_back


MAX_PROMPT_LOGPROBS = 128
"""Limit of scored prompt tokens per step, since the logits of each take memory."""

MAX_STEP_DRAFTS = 128
"""Limit of verified drafts per step, for the same reason."""


class BackendTraits(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Abilities of a backend's programs, apart from sizes. The engine adapts to each trait.

    | trait             | meaning                                                                                |
    |-------------------|----------------------------------------------------------------------------------------|
    | mixed_steps       | one dispatch takes prompt chunks and decodes; else the worker splits a step in two     |
    | padded_rows       | row counts that decode dispatches are padded to, ascending; () leaves them as they are |
    | chunk_tokens      | a prompt chunk is a multiple of this, but for the last one of a prompt                 |
    | page_tokens       | source tokens in a block of every KV group; 0 takes any block sizes                    |
    | samples_on_device | the program chooses tokens and feeds them to its own next step                         |
    | max_logprobs      | top log-probabilities that it can return for a token; -1 returns none                  |
    | adjusts_logits    | a device that samples applies LogitAdjustments                                         |
    | max_drafts        | draft tokens that it verifies for a row in one step                                    |
    | stages            | steps that a pipeline computes at once; a row decodes in one of them at a time         |
    | prompt_logprobs    | it gives logits of any token, not only of the last one of a row                        |
    """

    mixed_steps: bool = True
    padded_rows: tuple[int, ...] = ()
    chunk_tokens: int = 1
    page_tokens: int = 0
    samples_on_device: bool = False
    max_logprobs: int = MAX_LOGPROBS
    adjusts_logits: bool = True
    max_drafts: int = 0
    stages: int = 1
    prompt_logprobs: bool = True

    def __post_init__(self) -> None:
        rows = self.padded_rows
        if list(rows) != sorted(set(rows)) or (rows and rows[0] < 1):
            raise ConfigError(f"padded_rows is {rows}, but must ascend from at least 1")
        if self.chunk_tokens < 1:
            raise ConfigError(f"chunk_tokens is {self.chunk_tokens}, but must be at least 1")
        if self.stages < 1:
            raise ConfigError(f"stages is {self.stages}, but must be at least 1")


class BackendLimits(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The largest sizes that a program must handle. `depth` is the maximum number of steps in flight."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512
    max_model_len: int
    depth: int = 1
    traits: BackendTraits = BackendTraits()

    @property
    def max_prompt_logprobs(self) -> int:
        """Limit of scored prompt tokens per step."""
        if self.traits.samples_on_device or not self.traits.prompt_logprobs:
            return 0
        return max(self.traits.chunk_tokens, min(MAX_PROMPT_LOGPROBS, self.max_num_batched_tokens))

    @property
    def max_logits(self) -> int:
        """Limit of tokens per step whose logits are computed: sampling tokens, drafts, and scored prompt tokens."""
        return self.max_num_seqs + self.max_step_drafts + self.max_prompt_logprobs

    @property
    def max_step_drafts(self) -> int:
        """Limit of drafts per step."""
        return min(self.max_num_seqs * self.traits.max_drafts, MAX_STEP_DRAFTS)

    @property
    def max_rows(self) -> int:
        """Max rows of a dispatch, padding included."""
        padded = self.traits.padded_rows
        return next((rows for rows in padded if rows >= self.max_num_seqs), self.max_num_seqs)

    @property
    def held_steps(self) -> int:
        """Limit of steps that the program holds at once; if the host samples, which needs logits, one per stage."""
        return self.depth if self.traits.samples_on_device else min(self.depth, self.traits.stages)

    @property
    def held_dispatches(self) -> int:
        """Limit of dispatches that the program holds at once, each in buffers of its own."""
        return self.held_steps * (1 if self.traits.mixed_steps else 2)


class WorkerHello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A worker's first message: facts about its prepared program, and the contents of its stores."""

    epoch: int
    pid: int
    groups: tuple[KVCacheGroupSpec, ...]
    num_blocks: tuple[int, ...]
    limits: BackendLimits
    fingerprint: bytes
    load_s: float
    tiers: tuple[TierInventory, ...] = ()


class WorkerHeartbeat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """The heartbeat of an idle worker, at least every `heartbeat_s`."""

    epoch: int


FromWorker = WorkerHello | StepResult | WorkerHeartbeat
