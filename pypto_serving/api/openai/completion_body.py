"""Read the body of POST /v1/completions."""

from __future__ import annotations

from pypto_serving.api.generation.prompts import Prompter
from pypto_serving.api.generation.request import fit_params, fit_prompt
from pypto_serving.api.openai.body import ReadBody, parse_body, read_common
from pypto_serving.api.openai.fields import COMPLETION_RULES
from pypto_serving.api.openai.params import sampling_params
from pypto_serving.api.openai.prompts import encode_prompts
from pypto_serving.api.openai.schemas import CompletionBody
from pypto_serving.api.settings import ServingConfig
from pypto_serving.types.config import default_of
from pypto_serving.types.sampling import SamplingParams

DEFAULT_MAX_TOKENS = default_of(SamplingParams, "max_tokens")


def read_completion(prompter: Prompter, serving: ServingConfig, raw: bytes | bytearray) -> ReadBody:
    """Parse, check and encode. Raises RequestError that names the field at fault."""
    body, ignored = parse_body(raw, CompletionBody, COMPLETION_RULES)
    common = read_common(body, ignored, serving)
    given = sampling_params(body, serving.default_sampling, body.max_tokens, body.logprobs)
    params = fit_params(given, prompter)
    prompts = [
        fit_prompt(ids, params.max_tokens, prompter.config, default_max_tokens=DEFAULT_MAX_TOKENS)
        for ids in encode_prompts(prompter, body.prompt, params.n, body.add_special_tokens is not False)
    ]
    return ReadBody(prompts=prompts, params=params, **common)
