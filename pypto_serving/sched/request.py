"""Request: the state of one sequence in the engine. Only the Scheduler changes it."""

from __future__ import annotations

import enum
from array import array
from dataclasses import InitVar, dataclass, field
from operator import attrgetter

import numpy as np

from pypto_serving.types.arrays import pack_ids, unpack_ids
from pypto_serving.types.request import EngineRequest, Timeline
from pypto_serving.types.sampling import RowSampling
from pypto_serving.types.step import BackendTraits

PLAIN_TRAITS = BackendTraits()
MAX_NOTED_LOADS = 4
LOWEST_TEMPERATURE = 1e-5
"""Requests with lower temperatures are greedy, since dividing float32 logits by these could overflow."""


class Status(enum.Enum):
    WAITING = "waiting"
    WAITING_FOR_KV = "waiting_for_kv"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """Tokens of one sequence and how far they are computed. Owned by the Scheduler.

    Token intervals, half open:

        [0, num_committed)                      computed and confirmed
        [num_committed, num_computed_tokens)    computed by steps in flight
        [num_computed_tokens, num_tokens)       still to be scheduled
        [len(tokens), num_tokens)               placeholders: being sampled by steps in flight

    While drafts are in flight, `num_computed_tokens` and `num_tokens` are upper bounds: every draft counts as accepted.

    Other fields:

    - `max_tokens`: the length limit, prompt and output together.
    - `num_computable`: how many of these tokens are ever computed; see `num_uncomputed_tokens`.
    - `num_unscored`: prompt tokens whose log-probabilities are still to be delivered.
    - `order`: the scheduling order, by priority value and then by arrival.
    - `life`: how often the request has left its row; results of earlier lives are dropped.
    - `num_cached_tokens`: tokens cached when the request first started, -1 before that.
    - `has_guide`: a guide restricts the next token.
    - `plans_ahead`: a token may be scheduled while it is being sampled. False in a pipeline, which would wait for it,
      and if a sampling device needs the guide's answer first.
    """

    source: EngineRequest
    arrival_order: InitVar[int]
    max_model_len: InitVar[int]
    traits: InitVar[BackendTraits] = PLAIN_TRAITS
    id: str = field(init=False)
    order: tuple[int, int] = field(init=False)
    tokens: array[int] = field(init=False)
    prompt_len: int = field(init=False)
    max_tokens: int = field(init=False)
    num_computable: int = field(init=False)
    num_unscored: int = field(init=False)
    has_guide: bool = field(init=False)
    plans_ahead: bool = field(init=False)
    status: Status = Status.WAITING
    life: int = 0
    row: int = -1
    num_committed: int = 0
    num_computed_tokens: int = 0
    num_placeholders: int = 0
    num_cached_tokens: int = -1
    cached_by_tier: tuple[int, ...] = ()
    num_preemptions: int = 0
    last_step: int = 0
    scheduled_s: float = 0.0
    first_token_s: float = 0.0
    load_since_s: float = 0.0
    loads: list[float] = field(default_factory=list)

    def __post_init__(self, arrival_order: int, max_model_len: int, traits: BackendTraits) -> None:
        source = self.source
        self.id = source.request_id
        self.order = (source.priority, arrival_order)
        self.tokens = array("i", np.asarray(unpack_ids(source.token_ids), dtype=np.int32).tobytes())
        self.prompt_len = len(self.tokens)
        limit = source.params.max_tokens
        self.max_tokens = max_model_len if limit is None else min(max_model_len, self.prompt_len + limit)
        self.num_computable = self.max_tokens - (limit != 0)
        self.num_unscored = 0 if source.params.prompt_logprobs is None else self.prompt_len - 1
        self.has_guide = source.params.guide is not None
        self.plans_ahead = traits.stages == 1 and not (self.has_guide and traits.samples_on_device)

    def loaded(self, now_s: float) -> None:
        """Record begin and end of a wait for a KV load, for the first MAX_NOTED_LOADS."""
        if len(self.loads) < 2 * MAX_NOTED_LOADS:
            self.loads += self.load_since_s, now_s

    @property
    def num_tokens(self) -> int:
        """Number of tokens, placeholders included."""
        return len(self.tokens) + self.num_placeholders

    @property
    def num_uncomputed_tokens(self) -> int:
        """Number of tokens that can be scheduled now.

        The last token of a request that samples is never computed.
        """
        known = len(self.tokens) + (self.num_placeholders if self.plans_ahead else 0)
        return min(known, self.num_computable) - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def has_begun(self) -> bool:
        """Return True if output tokens, or log-probabilities of the prompt, were delivered."""
        scores = self.source.params.prompt_logprobs is not None
        return self.num_output_tokens > 0 or (scores and self.num_unscored < self.prompt_len - 1)

    def row_sampling(self) -> RowSampling:
        """Return the sampling parameters that the worker's row needs."""
        params, source = self.source.params, self.source
        scored = params.prompt_logprobs if self.num_unscored else None
        banned = {*source.eos_token_ids, *params.stop_token_ids} if params.min_tokens else set()
        return RowSampling(
            temperature=params.temperature if params.temperature >= LOWEST_TEMPERATURE else 0.0,
            top_k=max(0, params.top_k),
            top_p=params.top_p,
            min_p=params.min_p,
            seed=source.seed,
            choice=source.choice,
            min_tokens=params.min_tokens,
            banned_ids=pack_ids(sorted(banned)),
            num_logprobs=-1 if params.logprobs is None else params.logprobs,
            bias_ids=pack_ids(params.logit_bias),
            bias_values=array("f", params.logit_bias.values()).tobytes(),
            allowed_ids=pack_ids(params.allowed_token_ids or ()),
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            repetition_penalty=params.repetition_penalty,
            bad_words=tuple(map(pack_ids, params.bad_word_ids)),
            num_prompt_logprobs=-1 if scored is None else scored,
            num_prompt_logprobs_sent=self.prompt_len - 1 - self.num_unscored,
            guide=params.guide,
            eos_ids=pack_ids(source.eos_token_ids) if params.guide is not None else b"",
            logprob_ids=pack_ids(params.logprob_token_ids),
        )

    def timeline(self, now_s: float) -> Timeline:
        """Return the times of a request that ends at `now_s`."""
        first_token_s = self.first_token_s or now_s
        arrival_s, loads = self.source.arrival_s, tuple(self.loads)
        return Timeline(arrival_s, self.scheduled_s, first_token_s, now_s, self.num_preemptions, loads)


by_order = attrgetter("order")
"""Key that sorts requests by priority, then by arrival."""
