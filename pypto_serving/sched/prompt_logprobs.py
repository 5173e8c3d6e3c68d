"""Prompt log-probabilities: how a prompt that asks for them is cut, and their delivery."""

from __future__ import annotations

from pypto_serving.sched.request import Request, Status
from pypto_serving.sched.step import Step
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.request import RequestOutput
from pypto_serving.types.step import PromptLogprobs, RowFault, StepResult


def chunk(config: EngineConfig, step: Step, request: Request, missing: int) -> int:
    """Return how many of `missing` tokens of a prompt to schedule whose tokens are scored; 0 if they must wait.

    Take the logits that this needs from the step's `scored_budget`. The prompt is cut where that ends, also without
    chunked prefill. Positions of the row, half open:

        [0, first)              delivered before, or in flight
        [first, prompt_len - 1) to be scored by their logits
    """
    start, end = request.num_computed_tokens, request.prompt_len - 1
    first = max(start, end - request.num_unscored)
    count = min(missing, step.budget, config.scheduler.long_prefill_token_threshold or missing)
    if first + step.scored_budget < end:
        count = min(count, first + step.scored_budget - start)
    if count < missing:
        count -= count % config.limits.traits.chunk_tokens
    step.scored_budget -= max(0, min(start + count, end) - first)
    return count


def results(step: Step, result: StepResult) -> tuple[list[RequestOutput], list[tuple[Request, RowFault]]]:
    """Return the outputs with log-probabilities of prompts, and the requests that failed and did not sample."""
    scored = {each.row: each.logprobs for each in result.prompt_logprobs}
    faults = {fault.row: fault for fault in result.faults}
    found, failed = [], []
    for entry in step.scheduled:
        request = entry.request
        if request.life != entry.life or request.status is not Status.RUNNING:
            continue
        if (logprobs := scored.get(request.row)) is not None:
            found.append(_deliver(request, logprobs))
        if not entry.samples and (fault := faults.get(request.row)) is not None:
            failed.append((request, fault))
    return found, failed


def _deliver(request: Request, logprobs: PromptLogprobs) -> RequestOutput:
    """Return the output with the next log-probabilities of a prompt, which are not delivered again."""
    request.num_unscored -= logprobs.num_tokens
    return RequestOutput(request_id=request.id, prompt_logprobs=logprobs)
