"""Admission: refuse requests that can never be served, start waiting ones, or let them wait for blocks of others."""

from __future__ import annotations

from pypto_serving.errors import ConfigError, RequestError
from pypto_serving.kv.promotion import PrefixLoad
from pypto_serving.sched import budget
from pypto_serving.sched.registry import RequestRegistry
from pypto_serving.sched.request import Request, Status
from pypto_serving.sched.step import Step, new_row
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.request import EngineRequest, RequestFault
from pypto_serving.types.sampling import SamplingParams, adjusting, check_named_ids, guiding
from pypto_serving.types.tier import TIERS


def require_blocks(config: EngineConfig, num_blocks: tuple[int, ...]) -> None:
    """Raise ConfigError if any group's pool is too small for one request of the longest length.

    Lower tiers need one more block, for transfers. `num_blocks` includes each pool's null block.
    """
    more = " and tiers one more" if config.cache.tiers else ""
    for group, available, needed in zip(config.cache.groups, num_blocks, config.longest_blocks, strict=True):
        if needed + bool(config.cache.tiers) > available - 1:
            raise ConfigError(
                f"KV group {group.name} has {available - 1} blocks, a request of {config.limits.max_model_len} tokens "
                f"needs {needed}{more}; raise the option kv-memory or lower the option max-model-len"
            )


def unservable(source: EngineRequest, config: EngineConfig) -> RequestFault | None:
    """Return why a request can never be served, or None."""
    num_tokens = len(source.token_ids) // 4
    if num_tokens == 0:
        return RequestFault(400, "empty_prompt", "the prompt has no tokens; send at least one")
    if num_tokens >= config.limits.max_model_len:
        message = (
            f"the prompt has {num_tokens} tokens, but the context window has {config.limits.max_model_len} and at "
            "least one is for output; shorten the prompt"
        )
        return RequestFault(400, "context_length_exceeded", message)
    return _beyond_program(source.params, config)


def _beyond_program(params: SamplingParams, config: EngineConfig) -> RequestFault | None:
    """Return the fault of a sampling parameter beyond the program's abilities or the vocabulary, or None."""
    limit = config.limits.traits.max_logprobs
    if params.logprobs is not None and params.logprobs > limit:
        given = f"at most {limit} log-probabilities" if limit >= 0 else "no log-probabilities"
        return RequestFault(
            400, "unsupported_logprobs", f"logprobs is {params.logprobs}, but this device gives {given}"
        )
    if params.logprob_token_ids and config.limits.traits.samples_on_device:
        message = "logprob_token_ids is given, but this device gives log-probabilities of the most likely tokens only"
        return RequestFault(400, "unsupported_logprobs", message)
    if params.prompt_logprobs is not None and not config.limits.max_prompt_logprobs:
        message = "prompt_logprobs, or echo with logprobs, is asked for, but this device gives none; leave it out"
        return RequestFault(400, "unsupported_prompt_logprobs", message)
    if not config.limits.traits.adjusts_logits and (names := adjusting(params) + guiding(params)):
        message = f"this device cannot change logits, so it cannot do what {names[0]} asks for; leave it out"
        return RequestFault(400, "unsupported_adjustment", message)
    try:
        check_named_ids(params, config.model.vocab_size)
    except RequestError as error:
        return RequestFault(error.status, "invalid_token_id", str(error))
    return None


SPARE_BLOCKS = 0.01
"""Share of each pool that admission leaves free, so that running requests can grow.

A request starts only when all of its blocks fit. When its first chunk sufficed, 8 prompts of 800 tokens in a pool for
2.7 of them computed 9,560 tokens with 9 preemptions; now they compute 6,424 with none.
"""
MAX_SET_ASIDE = 64
"""Limit of requests that one step sets aside for a prefix wait or a later load, since it hashes each one's prompt."""


def admit_all(registry: RequestRegistry, step: Step, now_s: float, before: Request | None = None) -> None:
    """Start waiting requests in order until one must stay in the queue; only those that precede `before`, if given."""
    free_rows, waiting = registry.free_rows, registry.waiting
    while step.admits and step.budget > 0 and free_rows and step.num_set_aside < MAX_SET_ASIDE:
        request = waiting.peek()
        if request is None or (before is not None and request.order > before.order):
            return
        step.admits = request.id not in step.preempted and admit(registry, step, request, now_s)


def admit(registry: RequestRegistry, step: Step, request: Request, now_s: float) -> bool:
    """Start a waiting request, or move it to a prefix wait or load wait. Return False if it must stay first in line."""
    kv, loading = registry.kv, registry.load_wait
    matched = kv.match(request.id, request.tokens, request.source.cache_salt)
    may_wait = not registry.crash_counts.suspects
    if request.num_unscored:  # cached tokens have no logits to score
        matched, may_wait = 0, False
    if may_wait and registry.prefix_wait.wait(request, matched):
        step.num_set_aside += 1
        return True
    spare = SPARE_BLOCKS if registry.running else 0.0
    while not kv.fits(request.id, matched, request.num_tokens, registry.uncommitted_tokens, spare, step.reserved):
        if registry.running or loading.is_busy or not loading.release_one(request):
            return False
    if may_wait:
        load = kv.load_prefix(request.id, request.tokens, matched, may_begin=not loading.is_full)
        if load is PrefixLoad.BEGUN:
            loading.begin(request, now_s)
            return True
        if load is PrefixLoad.LATER and loading.put_off(request, now_s):
            step.num_set_aside += 1
            return True
    count = budget.chunk(registry.config, step, request, request.num_tokens - matched)
    if count == 0 or kv.reserve(request.id, matched + count, matched) is None:
        return False
    registry.start(request, matched)
    if request.num_cached_tokens < 0:
        _record_first_start(registry, request, matched, now_s)
    step.new_rows.append(new_row(request, kv.table(request.id)))
    step.schedule(request, count)
    reserve_growth(registry, step, request)
    return True


def reserve_growth(registry: RequestRegistry, step: Step, request: Request, sign: int = 1) -> None:
    """Reserve in `step` the blocks that a running prompt still needs; with `sign` -1, cancel the reservation."""
    if request.status is Status.RUNNING and request.num_uncomputed_tokens > 1:
        step.reserve(registry.kv.growth(request.num_computed_tokens, request.num_tokens), sign)


def _record_first_start(registry: RequestRegistry, request: Request, matched: int, now_s: float) -> None:
    """Record the cache hits of a request, by tier, and the time of its first step."""
    sources = registry.kv.sources(request.id, matched)
    for tier in registry.kv.tiers.tiers:
        tier.counters.hit_tokens += sources[tier.config.tier]
    request.num_cached_tokens = matched
    request.cached_by_tier = tuple(sources[tier] for tier in TIERS)
    request.scheduled_s = now_s
    registry.counters.record_prompt(request.prompt_len, matched)
