"""From a request body and the server's defaults to SamplingParams."""

from __future__ import annotations

from typing import Any

import msgspec

from pypto_serving.api.errors import brief
from pypto_serving.api.openai.schemas import GenerationBody
from pypto_serving.api.settings import DefaultSampling
from pypto_serving.errors import RequestError
from pypto_serving.types.sampling import SamplingParams

MAX_PRIORITY = 2**31 - 1
_PLAIN = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "ignore_eos",
    "seed",
    "skip_special_tokens",
)


def sampling_params(
    body: GenerationBody,
    defaults: DefaultSampling,
    vocab_size: int,
    max_tokens: int | None,
    logprobs: int | None,
) -> SamplingParams:
    """Validated parameters; raises RequestError naming the field at fault."""
    values: dict[str, Any] = defaults.given()
    values |= {name: value for name in _PLAIN if (value := getattr(body, name)) is not None}
    stop_ids = body.stop_token_ids or []
    for token_id in stop_ids:
        if not 0 <= token_id < vocab_size:
            message = f"stop_token_ids: {brief(token_id)} is not between 0 and {vocab_size - 1}"
            raise RequestError(message, param="stop_token_ids")
    return SamplingParams(
        **values,
        stop=_stop_strings(body.stop),
        stop_token_ids=tuple(stop_ids),
        max_tokens=max_tokens,
        logprobs=logprobs,
    )


def priority_of(body: GenerationBody) -> int:
    """How early the request is served: lower is earlier; raises RequestError beyond 32 bits."""
    if body.priority is not None and not -MAX_PRIORITY <= body.priority <= MAX_PRIORITY:
        message = f"priority is {brief(body.priority)}, but must be between {-MAX_PRIORITY} and {MAX_PRIORITY}"
        raise RequestError(message, param="priority")
    return body.priority or 0


def cache_salt_of(body: GenerationBody) -> str:
    """What cached prefixes are shared under; raises RequestError for an empty one, which would part nobody."""
    if body.cache_salt == "":
        raise RequestError("cache_salt is empty; send text, or leave it out", param="cache_salt")
    return body.cache_salt or ""


def parseable(params: SamplingParams) -> SamplingParams:
    """`params` under which an output's text keeps the special tokens that its parser looks for."""
    return msgspec.structs.replace(params, skip_special_tokens=False)


def _stop_strings(stop: Any) -> tuple[str, ...]:
    entries = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise RequestError(
            f"stop is {brief(stop)}, but must be a string or a list of strings",
            param="stop",
            code="invalid_type",
        )
    return tuple(entries)
