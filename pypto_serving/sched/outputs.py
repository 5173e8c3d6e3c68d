"""Decide when a request ends, and build RequestOutputs and faults."""

from __future__ import annotations

import msgspec

from pypto_serving.sched.request import Request
from pypto_serving.sched.step import RowResult
from pypto_serving.types.arrays import pack_list
from pypto_serving.types.request import RequestFault, RequestOutput
from pypto_serving.util import counted


def stop_reason(request: Request, token_id: int) -> str | None:
    """Return the reason why the token just appended ends the request, or None.

    - `stop`: it is a stop token or an end-of-sequence token.
    - `length`: the request has reached its length limit.
    """
    params = request.source.params
    if request.num_output_tokens >= params.min_tokens:
        if token_id in params.stop_token_ids:
            return "stop"
        if token_id in request.source.eos_token_ids and not params.ignore_eos:
            return "stop"
    if len(request.tokens) >= request.max_tokens:
        return "length"
    return None


def token_added(request: Request, token_id: int) -> RequestOutput:
    """Return an output with one token."""
    return RequestOutput(
        request_id=request.id,
        token_ids=token_id.to_bytes(4, "little"),
        num_cached_tokens=max(0, request.num_cached_tokens),
    )


def tokens_added(request: Request, row: RowResult, count: int) -> RequestOutput:
    """Return an output with the first `count` tokens of a row's result."""
    values = [each.logprobs for each in row.logprobs[:count]]
    return RequestOutput(
        request_id=request.id,
        token_ids=pack_list(row.token_ids[:count]),
        logprobs=values or None,
        num_cached_tokens=max(0, request.num_cached_tokens),
        num_drafts=row.num_drafts,
        num_accepted=min(row.num_accepted, count),
    )


def started(request: Request, first: RequestOutput) -> RequestOutput:
    """Add the cached tokens and the times so far to the `first` output of a request."""
    timeline = request.timeline(request.first_token_s)
    return msgspec.structs.replace(first, cached_by_tier=request.cached_by_tier, timeline=timeline)


def finished(request: Request, reason: str, fault: RequestFault | None, now_s: float) -> RequestOutput:
    """Return the last output of a request."""
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
    """Return `last` with the tokens, logprobs and drafts of `added`."""
    return msgspec.structs.replace(
        last,
        token_ids=added.token_ids,
        logprobs=added.logprobs,
        num_drafts=added.num_drafts,
        num_accepted=added.num_accepted,
    )


def deadline_passed(request: Request, now_s: float) -> RequestFault:
    """Return the 504 fault of a request whose deadline has passed."""
    after_s, count = now_s - request.source.arrival_s, request.num_output_tokens
    done = f"with {counted(count, 'output token')}" if request.scheduled_s else "in the queue"
    return RequestFault(504, "deadline_exceeded", f"the timeout of the request passed after {after_s:.1f} s, {done}")


def model_changed() -> RequestFault:
    """Return the 500 fault of a request that another model began to answer."""
    return RequestFault(
        500,
        "model_changed",
        "the model's files changed while it was served, and its worker had to load them again; send the request again",
    )


def crashes_worker(count: int) -> RequestFault:
    """Return the 500 fault of a request whose crash count is too high."""
    return RequestFault(
        500,
        "request_failed",
        f"the worker crashed {count} times while it computed this request, the last time with no other request "
        "in the step",
    )
