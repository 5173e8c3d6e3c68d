"""Describe a generation, and make engine requests of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from pypto_serving.api.chat.formats import OutputFormat
from pypto_serving.api.chat.parsers.thinking import Thinking
from pypto_serving.api.generation.bad_words import encode_bad_words
from pypto_serving.api.generation.max_tokens import fit_max_tokens
from pypto_serving.api.generation.prompts import Prompter
from pypto_serving.api.generation.seeds import SeedSource
from pypto_serving.api.generation.structured import with_guide
from pypto_serving.errors import RequestError
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.request import EngineRequest
from pypto_serving.types.sampling import SamplingParams, check_named_ids
from pypto_serving.types.tokens import pack_ids, view_ids

MAX_CHOICES = 512
"""Bounds the choices of all prompts of one request, since the event loop makes them at one go."""


class FittedPrompt(msgspec.Struct, frozen=True):
    """A prompt and how many tokens continue it; together they fit the context. Made by `fit_prompt`.

    `packed_ids` are its token ids as bytes of `pack_ids`.
    """

    packed_ids: bytes
    max_tokens: int

    @property
    def token_ids(self) -> Sequence[int]:
        """Return a view of the token ids."""
        return view_ids(self.packed_ids)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Prompts to continue together. Choices are numbered prompt by prompt.

    `id` is the beginning of every engine request's id. `params` are those of `fit_params`; `params.n` is the number of
    choices of each prompt. Lower `priority` is served earlier. Prefixes are shared within one `cache_salt`.
    `keep_token_ids` makes each choice collect its output token ids. `thinking` makes it count those of its reasoning.
    """

    id: str
    prompts: Sequence[FittedPrompt]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    keep_token_ids: bool = False
    thinking: Thinking | None = None

    @property
    def num_choices(self) -> int:
        """Return the number of choices of all prompts."""
        return self.params.n * len(self.prompts)


def check_num_choices(num_choices: int, num_prompts: int, config: EngineConfig) -> None:
    """Raise RequestError if `num_choices` choices of `num_prompts` prompts are more than an idle server takes."""
    param = "prompt" if num_prompts > 1 else "n"
    if num_choices > MAX_CHOICES:
        message = f"the request makes {num_choices} sequences, but must make at most {MAX_CHOICES}; send several"
        raise RequestError(message, param=param)
    if num_choices > config.max_unfinished:
        raise RequestError(
            f"the request makes {num_choices} sequences, but this server runs {config.max_num_seqs} at once and queues "
            f"{config.max_queued_requests}; ask for fewer",
            param=param,
        )


def fit_params(params: SamplingParams, prompter: Prompter, new_parser: OutputFormat | None = None) -> SamplingParams:
    """Return the parameters of a request, with bad words as token ids and structured outputs as a guide.

    Special tokens stay in the text if the parser needs to see them. Raises RequestError if a parameter
    names a token id outside the vocabulary, or like `encode_bad_words` and `with_guide`.
    """
    params = with_guide(encode_bad_words(params, prompter.tokenizer), prompter)
    check_named_ids(params, prompter.config.vocab_size)
    if params.skip_special_tokens and new_parser is not None and new_parser.shows_special:
        return msgspec.structs.replace(params, skip_special_tokens=False)
    return params


def fit_prompt(
    token_ids: Sequence[int],
    max_tokens: int | None,
    config: EngineConfig,
    *,
    default_max_tokens: int | None = None,
    max_tokens_field: str = "max_tokens",
) -> FittedPrompt:
    """Make a FittedPrompt whose max_tokens fits the context; see `fit_max_tokens` for the cases and errors."""
    fitting = fit_max_tokens(len(token_ids), max_tokens, default_max_tokens, config.max_model_len, max_tokens_field)
    return FittedPrompt(pack_ids(token_ids), fitting)


def engine_requests(
    request: GenerationRequest, seeds: SeedSource, eos_token_ids: tuple[int, ...], arrival_s: float
) -> list[EngineRequest]:
    """Make one engine request for each choice, in order.

    Choices of a prompt share its seed and token ids; all choices share their parameters, which have no stop strings:
    those are found here. Raises RequestError if `min_tokens` does not fit.
    """
    made: list[EngineRequest] = []
    known: dict[int, SamplingParams] = {}
    for prompt in request.prompts:
        seed = seeds.seed_of(request.params)
        params = known.get(prompt.max_tokens)
        if params is None:
            params = msgspec.structs.replace(request.params, n=1, stop=(), max_tokens=prompt.max_tokens)
            known[prompt.max_tokens] = params
        for choice in range(request.params.n):
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
