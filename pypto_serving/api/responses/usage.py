"""Token counts of responses and decisions."""

from __future__ import annotations

from typing import Self

from pypto_serving.api.generation.choice import TokenUsage
from pypto_serving.api.openai.answers import Answer


class InputTokensDetails(Answer):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Answer):
    reasoning_tokens: int


class ResponseUsage(Answer):
    """Tokens of all prompts and outputs. Caching costs nothing, so no token counts as written to the cache."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: TokenUsage) -> Self:
        return cls(
            input_tokens=usage.num_prompt_tokens,
            input_tokens_details=InputTokensDetails(usage.num_cached_tokens, 0),
            output_tokens=usage.num_output_tokens,
            output_tokens_details=OutputTokensDetails(usage.num_reasoning_tokens),
            total_tokens=usage.num_prompt_tokens + usage.num_output_tokens,
        )
