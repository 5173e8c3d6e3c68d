"""Read the body of POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from pypto_serving.api.common.body import ReadBody, Shown
from pypto_serving.api.generation.request import (
    check_num_choices,
    check_prompt_logprobs,
    fit_num_logprobs,
    fit_params,
    fit_prompt,
)
from pypto_serving.api.openai.params import parse_body, read_common, read_shown, sampling_params
from pypto_serving.api.openai.schemas import CompletionBody
from pypto_serving.api.prompting.prompts import Prompter, field_of
from pypto_serving.api.settings import ServingConfig
from pypto_serving.errors import RequestError
from pypto_serving.types.config import default_of
from pypto_serving.types.sampling import MAX_N, SamplingParams
from pypto_serving.util import brief

DEFAULT_MAX_TOKENS = default_of(SamplingParams, "max_tokens")


def read_completion(prompter: Prompter, serving: ServingConfig, raw: bytes | bytearray) -> ReadBody:
    """Parse, check and encode. Raises RequestError that names the field at fault."""
    body, ignored = parse_body(raw, CompletionBody)
    common = read_common(body, ignored, serving)
    given = sampling_params(body, serving.default_sampling, body.max_tokens, body.logprobs)
    shown = read_shown(body, given)
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
    check_prompt_logprobs(prompts, params)
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


def check_best_of(best_of: int | None, n: int, stream: bool) -> int:
    """Return how many choices of each prompt to make for `n` that are shown. Raises RequestError."""
    if best_of is None:
        return n
    if not n <= best_of <= MAX_N:
        message = f"best_of is {brief(best_of)}, but must be between n, which is {n}, and {MAX_N}"
        raise RequestError(message, param="best_of")
    if stream and best_of > n:
        message = f"best_of is {best_of} and n is {n}, but the best choices are known only at the end; do not stream"
        raise RequestError(message, param="best_of")
    return best_of


class EncodedPrompt(NamedTuple):
    """The token ids of a prompt, and its text if that was given."""

    token_ids: list[int]
    text: str | None


def encode_prompts(prompter: Prompter, prompt: Any, num_each: int, add_special_tokens: bool) -> Iterator[EncodedPrompt]:
    """Iterate over the prompts, of each of which `num_each` choices are made.

    Raises RequestError that names the prompt at fault.
    """
    if isinstance(prompt, str) or _is_ids(prompt):
        return iter([_encode(prompter, prompt, "prompt", add_special_tokens)])
    if not isinstance(prompt, list):
        raise _bad_type("prompt", prompt)
    if not prompt:
        raise RequestError("prompt is an empty list; send at least one prompt with at least one token", param="prompt")
    if type(prompt[0]) is int:
        raise _bad_type("prompt", next(entry for entry in prompt if type(entry) is not int))
    check_num_choices(len(prompt) * num_each, len(prompt), prompter.config)
    return (_encode(prompter, entry, f"prompt[{i}]", add_special_tokens) for i, entry in enumerate(prompt))


def _encode(prompter: Prompter, entry: Any, where: str, add_special_tokens: bool) -> EncodedPrompt:
    if isinstance(entry, str):
        return EncodedPrompt(prompter.encode_text(entry, where, add_special_tokens), entry)
    if _is_ids(entry):
        return EncodedPrompt(prompter.check_token_ids(entry, where), None)
    if entry == []:
        raise RequestError(f"{where} is an empty list; send at least one token", param=field_of(where))
    raise _bad_type(where, entry)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)


def _bad_type(where: str, value: Any) -> RequestError:
    forms = "a string, a list of strings, a list of token ids or a list of lists of token ids"
    if value is None:
        return RequestError(f"{where} is missing; send {forms}", param=field_of(where), code="missing_field")
    return RequestError(
        f"{where} holds {brief(value)}; prompt must be {forms}", param=field_of(where), code="invalid_type"
    )
