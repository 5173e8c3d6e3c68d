"""Read SamplingParams, priority and cache salt from a request body."""

from __future__ import annotations

import re
from typing import Any

from pypto_serving.api.common.schemas import MAX_SALT_CHARS, GenerationBody
from pypto_serving.api.common.structured import structured_outputs
from pypto_serving.api.settings import DefaultSampling
from pypto_serving.errors import RequestError
from pypto_serving.types.sampling import SamplingParams
from pypto_serving.util import brief

MAX_PRIORITY = 2**31 - 1
_TOKEN_ID = re.compile("[0-9]{1,10}")
_PLAIN = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "ignore_eos",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "truncate_prompt_tokens",
)


def sampling_params(
    body: GenerationBody,
    defaults: DefaultSampling,
    max_tokens: int | None,
    logprobs: int | None,
) -> SamplingParams:
    """Join the body with the server's defaults. Raises RequestError that names the field at fault."""
    values: dict[str, Any] = defaults.given()
    values |= {name: value for name in _PLAIN if (value := getattr(body, name)) is not None}
    return SamplingParams(
        **values,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        stop=_stop_strings(body.stop),
        logit_bias=_logit_bias(body.logit_bias),
        max_tokens=max_tokens,
        logprobs=logprobs,
        structured_outputs=structured_outputs(body),
    )


def priority_of(body: GenerationBody, may_choose: bool) -> int:
    """Return the priority; lower is served earlier. Raises RequestError if it does not fit 32 bits.

    Unless clients `may_choose`, only 0, the default, is accepted.
    """
    if body.priority and not may_choose:
        message = f"priority is {brief(body.priority)}, but this server lets no client choose one; leave it out"
        raise RequestError(message, param="priority", code="unsupported_field")
    if body.priority is not None and not -MAX_PRIORITY <= body.priority <= MAX_PRIORITY:
        message = f"priority is {brief(body.priority)}, but must be between {-MAX_PRIORITY} and {MAX_PRIORITY}"
        raise RequestError(message, param="priority")
    return body.priority or 0


def cache_salt_of(body: GenerationBody) -> str:
    """Return the cache salt, "" for none. Raises RequestError for an empty one, which would separate nobody."""
    if body.cache_salt == "":
        raise RequestError("cache_salt is empty; send text, or leave it out", param="cache_salt")
    if body.cache_salt is not None and len(body.cache_salt) > MAX_SALT_CHARS:
        message = f"cache_salt has {len(body.cache_salt)} characters, but must have at most {MAX_SALT_CHARS}"
        raise RequestError(message, param="cache_salt")
    return body.cache_salt or ""


def _logit_bias(given: dict[str, float] | None) -> dict[int, float]:
    """Return the biases by token id; JSON writes the ids as strings."""
    for key in given or {}:
        if not _TOKEN_ID.fullmatch(key):
            raise RequestError(
                f"logit_bias has the key {brief(key)}, but must map token ids to numbers", param="logit_bias"
            )
    return {int(key): value for key, value in (given or {}).items()}


def _stop_strings(stop: Any) -> tuple[str, ...]:
    entries = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise RequestError(
            f"stop is {brief(stop)}, but must be a string or a list of strings",
            param="stop",
            code="invalid_type",
        )
    return tuple(entries)
