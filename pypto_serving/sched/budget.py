"""Divide a step's token budget among decodes, prompt chunks and drafts."""

from __future__ import annotations

from pypto_serving.sched.request import Request
from pypto_serving.sched.step import Step
from pypto_serving.types.config import EngineConfig
from pypto_serving.util import ceil_div


def chunk(config: EngineConfig, step: Step, request: Request, missing: int) -> int:
    """Return how many of a request's `missing` tokens to schedule in this step; 0 if they must wait.

    A prompt is cut at a multiple of the program's `chunk_tokens`.
    """
    if missing > 1 and request.num_unscored:
        return scored_chunk(config, step, request, missing)
    if not config.scheduler.enable_chunked_prefill:
        return missing if missing <= step.budget else 0
    count = min(missing, step.budget, config.scheduler.long_prefill_token_threshold or missing)
    return count if count == missing else count - count % config.limits.traits.chunk_tokens


def scored_chunk(config: EngineConfig, step: Step, request: Request, missing: int) -> int:
    """Return how many `missing` tokens to schedule of a prompt whose tokens are scored; 0 if they must wait.

    Take the necessary logits from the step's `scored_budget`. The prompt is cut where that budget ends, even without
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


def prompt_share(config: EngineConfig, step: Step, head: Request | None) -> int:
    """Return the part of the budget that is reserved for prompts, so that neither prompts nor decodes starve.

    `head` is the first prompt in order. Without chunked prefill it needs room for all of its tokens, and gets it in
    every other step.
    """
    if head is None:
        return 0
    if not config.scheduler.enable_chunked_prefill:
        return head.num_tokens if step.step_id % 2 else 0
    return min(step.budget - 1, max(config.limits.traits.chunk_tokens, step.budget // 8))


def allow_drafts(step: Step, limit: int, num_decodes: int, prompt_waits: bool) -> None:
    """Allow the step at most `limit` drafts, and each of its `num_decodes` an equal share.

    If prompts wait, drafts get only a small part of the budget, since they may not pay.
    """
    if prompt_waits:
        limit = min(limit, step.budget // 8)
    step.draft_budget = max(0, limit)
    step.draft_share = ceil_div(step.draft_budget, max(1, num_decodes))


def num_drafts(config: EngineConfig, step: Step, request: Request) -> int:
    """Return how many drafts a decode may verify in addition to its own token, within draft budget and length limit.

    A sampling device gets a guide's masks before it knows its own drafts, so guided requests have no drafts there.
    """
    if request.has_guide and config.limits.traits.samples_on_device:
        return 0
    room = request.max_tokens - 2 - request.num_computed_tokens
    return max(0, min(config.num_drafts, step.draft_budget, step.draft_share, room))
