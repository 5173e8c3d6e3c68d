"""Write OpenAI's usage object."""

from __future__ import annotations

from typing import Any

from pypto_serving.api.generation.choice import TokenUsage
from pypto_serving.types.tier import TIERS


def usage_object(usage: TokenUsage, num_cut: int | None = None) -> dict[str, Any]:
    """Write token counts, the cached prompt tokens of each tier, the output tokens of reasoning, and drafts.

    Accepted drafts are among the completion tokens, rejected ones are not. If given, `num_cut` says how many tokens of
    the prompt were cut off.
    """
    truncated = {} if num_cut is None else {"truncated_tokens": num_cut}
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.num_cached_tokens,
            "cached_tokens_by_tier": dict(zip(TIERS, usage.cached_by_tier, strict=True)),
            **truncated,
        },
        "completion_tokens_details": {
            "reasoning_tokens": usage.num_reasoning_tokens,
            "accepted_prediction_tokens": usage.num_accepted_drafts,
            "rejected_prediction_tokens": usage.num_rejected_drafts,
        },
    }
