"""Read the body of POST /v1/completions."""

from __future__ import annotations

from typing import Any

import msgspec

from pypto_serving.api.common.body import ReadBody, parse_body, read_common
from pypto_serving.api.common.fields import COMPLETION_RULES
from pypto_serving.api.common.params import sampling_params
from pypto_serving.api.common.schemas import CompletionBody
from pypto_serving.api.common.shown import Shown
from pypto_serving.api.generation.request import check_scores, fit_num_logprobs, fit_params, fit_prompt
from pypto_serving.api.openai.best_of import check_best_of
from pypto_serving.api.openai.prompts import encode_prompts
from pypto_serving.api.prompting.prompts import Prompter
from pypto_serving.api.settings import ServingConfig
from pypto_serving.types.config import default_of
from pypto_serving.types.sampling import SamplingParams

DEFAULT_MAX_TOKENS = default_of(SamplingParams, "max_tokens")


def read_completion(prompter: Prompter, serving: ServingConfig, raw: bytes | bytearray) -> ReadBody:
    """Parse, check and encode. Raises RequestError that names the field at fault."""
    body, ignored = parse_body(raw, CompletionBody, COMPLETION_RULES)
    common = read_common(body, ignored, serving)
    given = sampling_params(body, serving.default_sampling, body.max_tokens, body.logprobs)
    shown = Shown.of(body, given)
    params = fit_params(_made(given, shown, check_best_of(body.best_of, given.n, bool(body.stream))), prompter)
    prompts = [
        fit_prompt(
            ids,
            params.max_tokens,
            prompter.config,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            truncate_to=params.truncate_prompt_tokens,
            text=text if shown.echo else None,
        )
        for ids, text in encode_prompts(prompter, body.prompt, params.n, body.add_special_tokens is not False)
    ]
    check_scores(prompts, params)
    if not body.stream:
        prompts = fit_num_logprobs(prompts, params, body.max_tokens)
    return ReadBody(prompts=prompts, params=params, shown=shown, **common)


def _made(params: SamplingParams, shown: Shown, num_made: int) -> SamplingParams:
    """Return what to make for what is shown: log-probabilities for choosing the best, and those of echoed prompts."""
    made: dict[str, Any] = {}
    if num_made > shown.n:
        made |= {"n": num_made, "logprobs": shown.logprobs or 0}
    if shown.echo and shown.logprobs is not None:
        made["prompt_logprobs"] = max(shown.logprobs, shown.prompt_logprobs or 0)
    return msgspec.structs.replace(params, **made) if made else params
