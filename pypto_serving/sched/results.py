"""Apply the result of a step to its requests, and build their outputs."""

from __future__ import annotations

from pypto_serving.sched import outputs
from pypto_serving.sched.registry import RequestRegistry
from pypto_serving.sched.request import Request, Status
from pypto_serving.sched.step import RowResult, Scheduled, Step, plain_tokens, rows_of
from pypto_serving.types.arrays import ID_BYTES
from pypto_serving.types.request import RequestFault, RequestOutput
from pypto_serving.types.step import NOT_FINITE, RowFault, StepResult, num_taken_back


def take_result(registry: RequestRegistry, step: Step, result: StepResult, now_s: float) -> list[RequestOutput]:
    """Apply the result of a step. Return the new tokens of each request.

    Ignores rows of requests that have left their row since the step was planned.
    """
    plain = plain_tokens(result)
    rows = rows_of(result) if plain is None else {}
    _measure(registry, step, result)
    added = _take_prompts(registry, step, result, now_s) if result.prompt_logprobs or result.faults else []
    for entry in step.scheduled:
        request = entry.request
        if request.life != entry.life or request.status is not Status.RUNNING:
            continue
        if not entry.samples or (request.has_guide and request.num_committed + entry.count < len(request.tokens)):
            _take_back(request, entry.num_drafts)
            _advance(registry, request, entry.count)
            if request.num_committed == request.max_tokens:  # the request samples no token
                added.append(registry.finish(request, "length", now_s=now_s))
        elif plain is not None:
            added.append(_append(registry, entry, plain[request.row], now_s))
        elif (output := _take_row(registry, entry, rows[request.row], now_s)) is not None:
            added.append(output)
    return added


def _append(registry: RequestRegistry, entry: Scheduled, token_id: int, now_s: float) -> RequestOutput:
    """Fast form of `_take_row` for a row with one token and nothing else, as most rows are."""
    request = entry.request
    request.num_placeholders -= 1 + entry.num_drafts
    request.num_computed_tokens -= entry.num_drafts
    request.tokens.append(token_id)
    registry.counters.generation_tokens += 1
    reason = outputs.stop_reason(request, token_id)
    output = outputs.token_added(request, token_id)
    if not request.first_token_s:
        request.first_token_s = now_s
        output = outputs.started(request, output)
    _advance(registry, request, entry.count)
    return output if reason is None else outputs.merged(output, registry.finish(request, reason, now_s=now_s))


def _take_row(registry: RequestRegistry, entry: Scheduled, row: RowResult, now_s: float) -> RequestOutput | None:
    """Append the tokens of a row, up to the one that ends its request. Take back rejected drafts.

    Forced tokens after the sampled ones are not computed yet, so steps in flight do not reach the last token.
    If a token ends the request, a later fault is ignored, except a fault of the prompt's logits.
    """
    request, reason = entry.request, None
    request.num_placeholders -= 1 + entry.num_drafts
    count = 0
    while reason is None and count < len(row.token_ids):
        request.tokens.append(row.token_ids[count])
        reason = outputs.stop_reason(request, row.token_ids[count])
        count += 1
    registry.counters.generation_tokens += count
    if row.num_drafts:
        registry.counters.record_drafts(row.num_drafts, row.num_accepted)
    output = outputs.tokens_added(request, row, count)
    if row.token_ids and not request.first_token_s:
        request.first_token_s = now_s
        output = outputs.started(request, output)
    if row.fault is not None and (reason is None or request.num_unscored):
        return outputs.merged(output, _fail(registry, request, row.fault, now_s))
    taken_back = num_taken_back(entry.num_drafts, row.num_accepted, len(row.token_ids))
    _take_back(request, taken_back)
    _advance(registry, request, entry.count + entry.num_drafts - taken_back)
    if reason is None:
        return output if count else None
    return outputs.merged(output, registry.finish(request, reason, now_s=now_s))


def _take_prompts(registry: RequestRegistry, step: Step, result: StepResult, now_s: float) -> list[RequestOutput]:
    """Deliver log-probabilities of prompt tokens. End requests that failed without sampling."""
    scored = {each.row: each.logprobs for each in result.prompt_logprobs}
    faults = {fault.row: fault for fault in result.faults}
    found = []
    for entry in step.scheduled:
        request = entry.request
        if request.life != entry.life or request.status is not Status.RUNNING:
            continue
        if (logprobs := scored.get(request.row)) is not None:
            request.num_unscored -= logprobs.num_tokens
            found.append(RequestOutput(request_id=request.id, prompt_logprobs=logprobs))
        if not entry.samples and (fault := faults.get(request.row)) is not None:
            found.append(_fail(registry, request, fault, now_s))
    return found


def _fail(registry: RequestRegistry, request: Request, fault: RowFault, now_s: float) -> RequestOutput:
    """End a request whose row failed."""
    if fault.code == NOT_FINITE:
        registry.kv.discard(request.id)
    reported = RequestFault(fault.status, fault.code, fault.message, fault.param)
    return registry.finish(request, "error", reported, now_s)


def _advance(registry: RequestRegistry, request: Request, count: int) -> None:
    """Commit `count` more tokens as computed."""
    request.num_committed += count
    registry.kv.commit(request.id, request.tokens, request.num_committed, request.prompt_len)
    if registry.crash_counts:
        registry.crash_counts.clear_committed(request.id, request.num_committed)


def _measure(registry: RequestRegistry, step: Step, result: StepResult) -> None:
    """Record the times of a step, and its speed: as decoding speed if most rows decode, else as prefill speed."""
    registry.counters.record_times(result)
    num_tokens = sum(entry.count for entry in step.scheduled)
    if num_tokens > 2 * len(step.scheduled):
        registry.kv.tiers.promotions.record_prefill(num_tokens, result.elapsed_s)
    else:
        registry.counters.decode_rate.add(len(result.token_ids) // ID_BYTES, result.elapsed_s)


def _take_back(request: Request, count: int) -> None:
    """Take back `count` planned tokens, including drafts, that were not computed."""
    request.num_computed_tokens -= count
    if request.has_guide:  # forced tokens are known before they are planned
        request.num_placeholders = max(0, request.num_computed_tokens + 1 - len(request.tokens))
