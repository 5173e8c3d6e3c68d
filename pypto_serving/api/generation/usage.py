"""Count the tokens of a generation."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pypto_serving.api.generation.choice import Choice
from pypto_serving.types.tier import TIERS


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a generation; those of a prompt count once, however many choices it has.

    `cached_by_tier` splits `num_cached_tokens` by `types.tier.TIERS`; it counts finished prompts only.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    cached_by_tier: tuple[int, ...]
    num_reasoning_tokens: int = 0
    num_accepted_drafts: int = 0
    num_rejected_drafts: int = 0


def count_usage(choices: Sequence[Choice]) -> Usage:
    """Count tokens over all choices, in any number for each prompt; the first of a prompt stands for its prompt."""
    firsts = list({choice.prompt: choice for choice in reversed(choices)}.values())
    by_tier = [choice.cached_by_tier for choice in firsts if choice.cached_by_tier]
    return Usage(
        num_prompt_tokens=sum(choice.num_prompt for choice in firsts),
        num_output_tokens=sum(choice.num_tokens for choice in choices),
        num_cached_tokens=sum(choice.num_cached for choice in firsts),
        cached_by_tier=tuple(map(sum, zip(*by_tier, strict=True))) if by_tier else (0,) * len(TIERS),
        num_reasoning_tokens=sum(choice.num_reasoning for choice in choices),
        num_accepted_drafts=sum(choice.num_accepted for choice in choices),
        num_rejected_drafts=sum(choice.num_drafts - choice.num_accepted for choice in choices),
    )
