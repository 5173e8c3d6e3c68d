"""Fit max_tokens to the context window."""

from __future__ import annotations

from pypto_serving.errors import ContextLengthError


def fit_max_tokens(
    num_prompt: int,
    asked: int | None,
    default: int | None,
    max_model_len: int,
    field: str = "max_tokens",
    prompt_field: str = "prompt",
) -> int:
    """Return how many tokens may be generated after `num_prompt` prompt tokens.

    - `asked`: return it; raise ContextLengthError if it does not fit. `field` is its name in the error.
    - else `default`: return it, cut to what fits.
    - else: return what fits.

    Raises ContextLengthError, for `prompt_field`, if the prompt leaves no room for one token.
    """
    room = max_model_len - num_prompt
    if room < 1:
        raise ContextLengthError(
            max_model_len,
            f"However, the prompt has {num_prompt} tokens and needs room for at least one output token; shorten it",
            param=prompt_field,
        )
    if asked is None:
        return room if default is None else min(default, room)
    if asked > room:
        raise ContextLengthError(
            max_model_len,
            f"However, the prompt has {num_prompt} tokens and {field} is {asked}, together {num_prompt + asked}; "
            f"shorten the prompt or ask for at most {room} tokens",
            param=field,
        )
    return asked
