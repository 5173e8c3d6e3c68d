"""Why a request ends, and the RequestOutputs that say so."""

from __future__ import annotations

import msgspec

from pypto_serving.sched.request import Request
from pypto_serving.sched.step import RowResult
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.request import RequestFault, RequestOutput, TokenLogprobs
from pypto_serving.types.sampling import SamplingParams
from pypto_serving.types.tokens import pack_few


def stop_reason(request: Request, token_id: int) -> str | None:
    """`stop` when the token just appended ends the request, `length` when no more fit, else None."""
    params = request.source.params
    if request.num_output_tokens >= params.min_tokens:
        if token_id in params.stop_token_ids:
            return "stop"
        if token_id in request.source.eos_token_ids and not params.ignore_eos:
            return "stop"
    if len(request.tokens) >= request.max_tokens:
        return "length"
    return None


def tokens_added(request: Request, row: RowResult, count: int) -> RequestOutput:
    """The output of the first `count` tokens that a step sampled for a request."""
    values = [TokenLogprobs(each.logprob, each.rank, each.top_ids, each.top_logprobs) for each in row.logprobs[:count]]
    return RequestOutput(
        request_id=request.id,
        token_ids=pack_few(row.token_ids[:count]),
        logprobs=values or None,
        num_cached_tokens=max(0, request.num_cached_tokens),
    )


def finished(request: Request, reason: str, fault: RequestFault | None, now_s: float) -> RequestOutput:
    """The last output of a request."""
    last = request.tokens[-1]
    stopped_by_id = reason == "stop" and last in request.source.params.stop_token_ids
    return RequestOutput(
        request_id=request.id,
        finish_reason=reason,
        stop_token_id=last if stopped_by_id else None,
        num_cached_tokens=max(0, request.num_cached_tokens),
        cached_by_tier=request.cached_by_tier,
        timeline=request.timeline(now_s),
        fault=fault,
    )


def merged(added: RequestOutput, last: RequestOutput) -> RequestOutput:
    """`last` with the tokens of `added`."""
    return msgspec.structs.replace(last, token_ids=added.token_ids, logprobs=added.logprobs)


def too_long(num_tokens: int, config: EngineConfig) -> str:
    return (
        f"the prompt has {num_tokens} tokens, the context window {config.max_model_len}, of which at least one is "
        f"for output; shorten the prompt"
    )


def beyond_program(params: SamplingParams, config: EngineConfig) -> RequestFault | None:
    """Refuse what the program cannot do for a request."""
    most = config.traits.max_logprobs
    if params.logprobs is not None and params.logprobs > most:
        given = f"at most {most} log-probabilities" if most >= 0 else "no log-probabilities"
        return RequestFault(
            400, "unsupported_logprobs", f"logprobs is {params.logprobs}, but this device gives {given}"
        )
    for name, ids in (("logit_bias", params.logit_bias), ("allowed_token_ids", params.allowed_token_ids)):
        wrong = next((token_id for token_id in ids if token_id >= config.vocab_size), None)
        if wrong is not None:
            message = f"{name} has {wrong}, which is no token: this model has {config.vocab_size}"
            return RequestFault(400, "invalid_token_id", message)
    return None


def too_few_blocks(group: str, num_blocks: int, needed: int, config: EngineConfig) -> str:
    return (
        f"KV group {group} has {num_blocks} blocks, a request of {config.max_model_len} tokens needs {needed}; "
        f"raise --kv-memory or lower --max-model-len"
    )


def queue_timeout(request: Request, now_s: float) -> RequestFault:
    waited_s = now_s - request.source.arrival_s
    return RequestFault(503, "queue_timeout", f"the request waited {waited_s:.1f} s in the queue; try again later")


def crashes_worker(request: Request) -> RequestFault:
    return RequestFault(
        500,
        "request_failed",
        f"the worker crashed {request.strikes} times while computing this request, at last with nothing beside it; "
        "it was given up",
    )
