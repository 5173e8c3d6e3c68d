"""Usage: the tokens of a prompt count once, however many choices it has."""

from __future__ import annotations

from pypto_serving.api.generation.choice import Choice, count_usage
from pypto_serving.api.generation.request import FittedPrompt, GenerationRequest, engine_requests
from pypto_serving.api.service import SeedSource
from pypto_serving.types.arrays import pack_ids
from pypto_serving.types.request import RequestOutput
from pypto_serving.types.sampling import SamplingParams
from pypto_serving.types.tier import TIERS


def test_prompts_with_different_numbers_of_choices() -> None:
    prompts = [FittedPrompt(pack_ids([1] * 10), 16), FittedPrompt(pack_ids([1] * 4), 16)]
    request = GenerationRequest("a", prompts, SamplingParams(n=2))
    made = engine_requests(request, SeedSource(0), (), 0.0)
    choices = [Choice(i, one, request, None) for i, one in enumerate(made)]
    assert [choice.prompt for choice in choices] == [0, 0, 1, 1]
    for choice, cached in zip(choices, (8, 9, 2, 2), strict=True):
        by_tier = (cached,) + (0,) * (len(TIERS) - 1)
        choice.take(
            RequestOutput(
                request_id=choice.request_id,
                token_ids=pack_ids([5, 6]),
                finish_reason="length",
                num_cached_tokens=cached,
                cached_by_tier=by_tier,
            )
        )
    usage = count_usage(choices)
    assert (usage.num_prompt_tokens, usage.num_output_tokens, usage.num_cached_tokens) == (14, 8, 10)
    assert sum(usage.cached_by_tier) == 10
