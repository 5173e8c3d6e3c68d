"""Describe a generation, and make engine requests of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from pypto_serving.api.chat.formats import OutputFormat
from pypto_serving.api.generation.max_tokens import fit_max_tokens
from pypto_serving.api.generation.seeds import SeedSource
from pypto_serving.errors import RequestError
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.request import EngineRequest
from pypto_serving.types.sampling import SamplingParams, check_named_ids
from pypto_serving.types.tokens import pack_ids, view_ids


class FittedPrompt(msgspec.Struct, frozen=True):
    """A prompt and how to continue it; both fit the context. Made by `fit_prompt`.

    `packed_ids` are its token ids as bytes of `pack_ids`. `params.n` is the number of choices. `new_parser` makes the
    parser of one choice's text; None means plain text.
    """

    packed_ids: bytes
    params: SamplingParams
    new_parser: OutputFormat | None = None

    @property
    def token_ids(self) -> Sequence[int]:
        """Return a view of the token ids."""
        return view_ids(self.packed_ids)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Prompts to continue together. Choices are numbered prompt by prompt.

    `id` is the beginning of every engine request's id. Lower `priority` is served earlier. Prefixes are shared within
    one `cache_salt`. `keep_token_ids` makes each choice collect its output token ids.
    """

    id: str
    prompts: Sequence[FittedPrompt]
    priority: int = 0
    cache_salt: str = ""
    keep_token_ids: bool = False

    @property
    def num_choices(self) -> int:
        """Return the number of choices of all prompts."""
        return sum(prompt.params.n for prompt in self.prompts)


def check_num_choices(num_choices: int, num_prompts: int, config: EngineConfig) -> None:
    """Raise RequestError if not even an idle server could hold `num_choices` choices of `num_prompts` prompts."""
    if num_choices > config.max_unfinished:
        raise RequestError(
            f"the request makes {num_choices} sequences, but this server runs {config.max_num_seqs} at once and queues "
            f"{config.max_queued_requests}; ask for fewer",
            param="prompt" if num_prompts > 1 else "n",
        )


def fit_prompt(
    token_ids: Sequence[int],
    params: SamplingParams,
    config: EngineConfig,
    *,
    default_max_tokens: int | None = None,
    max_tokens_field: str = "max_tokens",
    new_parser: OutputFormat | None = None,
) -> FittedPrompt:
    """Make a FittedPrompt whose max_tokens fits the context; see `fit_max_tokens` for the cases and errors.

    Raises RequestError if `params` names a token id outside the vocabulary. A parser needs to see special tokens, so
    with `new_parser` they stay in the text.
    """
    check_named_ids(params, config.vocab_size)
    max_tokens = fit_max_tokens(
        len(token_ids), params.max_tokens, default_max_tokens, config.max_model_len, max_tokens_field
    )
    skip = params.skip_special_tokens and new_parser is None
    params = msgspec.structs.replace(params, max_tokens=max_tokens, skip_special_tokens=skip)
    return FittedPrompt(pack_ids(token_ids), params, new_parser)


def engine_requests(
    request: GenerationRequest, seeds: SeedSource, eos_token_ids: tuple[int, ...], arrival_s: float
) -> list[EngineRequest]:
    """Make one engine request for each choice, in order; choices of a prompt share its seed and token ids."""
    made: list[EngineRequest] = []
    for prompt in request.prompts:
        seed = seeds.seed_of(prompt.params)
        params = msgspec.structs.replace(prompt.params, n=1)
        for choice in range(prompt.params.n):
            made.append(
                EngineRequest(
                    request_id=f"{request.id}-{len(made)}",
                    token_ids=prompt.packed_ids,
                    params=params,
                    eos_token_ids=eos_token_ids,
                    seed=seed,
                    choice=choice,
                    priority=request.priority,
                    arrival_s=arrival_s,
                    cache_salt=request.cache_salt,
                )
            )
    return made
