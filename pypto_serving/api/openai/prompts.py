"""Read the `prompt` of a completion in all its forms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from pypto_serving.api.generation.request import check_num_choices
from pypto_serving.api.prompting.prompts import Prompter, field_of
from pypto_serving.errors import RequestError
from pypto_serving.util import brief


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
