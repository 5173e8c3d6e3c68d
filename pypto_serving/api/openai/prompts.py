"""Prompts in all their forms, turned into token ids that are known to fit the model."""

from __future__ import annotations

from typing import Any

from pypto_serving.api.chat import EncodedChat
from pypto_serving.api.errors import brief
from pypto_serving.api.service import Service
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.errors import ContextLengthError, RequestError

MAX_CHARS_PER_TOKEN = 256


async def encode_prompts(service: Service, prompt: Any, add_special_tokens: bool) -> list[list[int]]:
    """Token ids of each prompt in a completion's `prompt`; raises RequestError naming the prompt at fault."""
    if isinstance(prompt, str) or _is_ids(prompt):
        return [await _encode(service, prompt, "prompt", add_special_tokens)]
    if not isinstance(prompt, list):
        raise _bad_type("prompt", prompt)
    if not prompt:
        raise RequestError("prompt is an empty list; send at least one prompt with at least one token", param="prompt")
    if type(prompt[0]) is int:
        raise _bad_type("prompt", next(entry for entry in prompt if type(entry) is not int))
    return [await _encode(service, entry, f"prompt[{i}]", add_special_tokens) for i, entry in enumerate(prompt)]


def require_tokenizer(service: Service, where: str) -> Tokenizer:
    """The model's tokenizer; raises RequestError where there is none."""
    if service.tokenizer is None:
        raise RequestError(f"this model has no tokenizer.json: {where} must be a list of token ids", param="prompt")
    return service.tokenizer


async def encode_text(service: Service, text: str, where: str, add_special_tokens: bool) -> list[int]:
    """Token ids of one text; raises RequestError for an empty or a hopelessly long one."""
    tokenizer = require_tokenizer(service, where)
    limit = service.engine.config.max_model_len
    if len(text) > limit * MAX_CHARS_PER_TOKEN:
        raise ContextLengthError(
            f"{where} has {len(text)} characters, which cannot fit the model's context of {limit} tokens; shorten it",
            param=_param(where),
        )
    ids = await tokenizer.encode_async(text, add_special_tokens)
    if not ids:
        raise RequestError(f"{where} is empty; send at least one token", param=_param(where))
    return check_ids(service, ids, where)


async def encode_chat(service: Service, chat: EncodedChat, add_special_tokens: bool) -> list[int]:
    """Token ids of a written conversation; raises RequestError as `encode_text` and `check_ids` do."""
    if isinstance(chat.prompt, str):
        return await encode_text(service, chat.prompt, "messages", add_special_tokens)
    return check_ids(service, chat.prompt, "messages")


def check_ids(service: Service, ids: list[int], where: str) -> list[int]:
    """`ids` where all of them are tokens of the model; raises RequestError otherwise."""
    vocab_size = service.engine.config.vocab_size
    if min(ids) < 0 or max(ids) >= vocab_size:
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise RequestError(f"{where}: token id {brief(bad)} is not between 0 and {vocab_size - 1}", param=_param(where))
    return ids


def fit_max_tokens(
    num_prompt: int, explicit: int | None, default: int | None, max_model_len: int, param: str = "max_tokens"
) -> int:
    """How many tokens may be generated: what the request says, else `default`, else what fits.

    Raises ContextLengthError, naming the lengths, where the prompt leaves no room or `explicit` does not fit.
    """
    room = max_model_len - num_prompt
    if room < 1:
        raise ContextLengthError(
            f"the prompt has {num_prompt} tokens, but the model's context is {max_model_len} tokens, "
            f"prompt and at least one output token together; shorten the prompt",
            param="prompt",
        )
    if explicit is not None and explicit > room:
        raise ContextLengthError(
            f"the prompt has {num_prompt} tokens and {param} is {explicit}, together {num_prompt + explicit}, but the "
            f"model's context is {max_model_len} tokens; shorten the prompt or ask for at most {room} tokens",
            param=param,
        )
    wanted = default if explicit is None else explicit
    return room if wanted is None else min(wanted, room)


async def _encode(service: Service, entry: Any, where: str, add_special_tokens: bool) -> list[int]:
    if isinstance(entry, str):
        return await encode_text(service, entry, where, add_special_tokens)
    if _is_ids(entry):
        return check_ids(service, entry, where)
    if entry == []:
        raise RequestError(f"{where} is an empty list; send at least one token", param=_param(where))
    raise _bad_type(where, entry)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)


def _bad_type(where: str, value: Any) -> RequestError:
    forms = "a string, a list of strings, a list of token ids or a list of lists of token ids"
    if value is None:
        return RequestError(f"{where} is missing; send {forms}", param=_param(where), code="missing_field")
    return RequestError(
        f"{where} holds {brief(value)}; prompt must be {forms}", param=_param(where), code="invalid_type"
    )


def _param(where: str) -> str:
    return where.partition("[")[0]
