"""Shown: what a body asks an answer to show beside the text."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from pypto_serving.api.common.schemas import CompletionBody, GenerationBody
from pypto_serving.errors import RequestError
from pypto_serving.types.sampling import SamplingParams
from pypto_serving.util import brief

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer shows, as the body asks.

    - `request_id`: what the id of the answer ends with; None for the server's own.
    - `n`: choices of each prompt, the best ones if more are made.
    - `usage`, `usage_so_far`: the last event of a stream has the usage; each event has the usage so far.
    - `logprobs`: so many most likely tokens beside each token of the text; None for no log-probabilities.
    - `echo`: the text begins with the prompt.
    - `prompt_logprobs`: so many most likely tokens beside each token of the prompt, in a field of their own.
    - `token_ids`: those of prompt and output. `tokens_as_ids`: log-probabilities name tokens by their ids.
    - `truncation`: how many tokens of the prompts were cut off.
    - `service_tier`: the only one that there is, if the body names any.
    """

    request_id: str | None = None
    n: int = 1
    usage: bool = False
    usage_so_far: bool = False
    logprobs: int | None = None
    echo: bool = False
    prompt_logprobs: int | None = None
    token_ids: bool = False
    tokens_as_ids: bool = False
    truncation: bool = False
    service_tier: Literal["default"] | None = None

    @classmethod
    def of(cls, body: GenerationBody, params: SamplingParams) -> Shown:
        """Read what `body` asks for, whose sampling parameters are `params`. Raises RequestError."""
        if body.stream and body.prompt_logprobs is not None:
            message = "prompt_logprobs is not available together with stream = true; leave one of them out"
            raise RequestError(message, param="prompt_logprobs")
        if body.request_id is not None and not _REQUEST_ID.fullmatch(body.request_id):
            message = f"request_id is {brief(body.request_id)}, but must have 1 to 128 visible characters of ASCII"
            raise RequestError(message, param="request_id")
        options = body.stream_options
        usage = bool(options and options.include_usage)
        return cls(
            request_id=body.request_id,
            n=params.n,
            usage=usage,
            usage_so_far=usage and bool(options and options.continuous_usage_stats),
            logprobs=params.logprobs,
            echo=isinstance(body, CompletionBody) and bool(body.echo),
            prompt_logprobs=body.prompt_logprobs,
            token_ids=bool(body.return_token_ids),
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
            truncation=body.truncate_prompt_tokens is not None,
            service_tier=None if body.service_tier is None else "default",
        )
