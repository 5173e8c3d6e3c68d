"""Read prompts, conversations and sampling parameters as programs write them. Raises RequestError for all else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pypto_serving.api.generation.request import read_message
from pypto_serving.errors import RequestError
from pypto_serving.types.sampling import SamplingParams
from pypto_serving.util import brief, entries, whole

Prompt = str | Sequence[int] | npt.NDArray[np.integer[Any]] | Mapping[str, Any]
"""A text, token ids, or vLLM's `{"prompt": text}` or `{"prompt_token_ids": ids}`."""
Messages = Sequence[Mapping[str, Any]]

_PROMPT = "a text, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}"
_CONVERSATION = "a list of messages such as {'role': 'user', 'content': 'Hello'}"


def read_prompts(prompts: Any) -> list[str | list[int]]:
    """List the prompts as texts or token ids; a list that starts with an integer is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [_prompt(prompts, "prompts")]
    given = _entries(prompts, "prompts", f"a prompt or a list of prompts; a prompt is {_PROMPT}")
    if given and _is_token_id(given[0]):
        return [_token_ids(given, "prompts")]
    return [_prompt(entry, f"prompts[{i}]") for i, entry in enumerate(given)]


def read_conversations(messages: Any) -> list[Messages]:
    """List the conversations; a list that starts with a message is one conversation."""
    given = _entries(messages, "messages", f"{_CONVERSATION}, or a list of such lists")
    if not given or isinstance(given[0], Mapping):
        return [_conversation(given, "messages")]
    return [_conversation(entry, f"messages[{i}]") for i, entry in enumerate(given)]


def read_conversation(messages: Any) -> Messages:
    """Return the only conversation."""
    return _conversation(messages, "messages")


def read_params(given: Any, count: int) -> list[SamplingParams]:
    """List the parameters of each of `count` prompts: one for all, or one for each."""
    if isinstance(given, SamplingParams):
        return [given] * count
    params = _entries(given, "sampling_params", "a SamplingParams or a list of them")
    for i, one in enumerate(params):
        if not isinstance(one, SamplingParams):
            raise _refusal(f"sampling_params[{i}]", one, "a SamplingParams")
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling_params for {count} prompts; give one, or one for each")
    return params


def read_chat_fields(fields: Mapping[str, Any], template_kwargs: Any) -> Mapping[str, Any]:
    """Join the fields of a chat that are not None with the chat_template_kwargs."""
    if not isinstance(template_kwargs, Mapping | None):
        raise _refusal("chat_template_kwargs", template_kwargs, "a mapping from names to values")
    given = {name: value for name, value in fields.items() if value is not None}
    if isinstance(given.get("tools"), Sequence):
        given["tools"] = list(given["tools"])
    return {**(template_kwargs or {}), **given}


def _refusal(where: str, value: object, allowed: str) -> RequestError:
    return RequestError(f"{where} is {brief(value)}, but must be {allowed}", param=where.partition("[")[0])


def _entries(value: Any, where: str, allowed: str) -> list[Any]:
    try:
        return entries(value)
    except ValueError:
        raise _refusal(where, value, allowed) from None


def _prompt(entry: Any, where: str) -> str | list[int]:
    if isinstance(entry, str):
        return entry
    if isinstance(entry, Mapping):
        return _prompt_of_mapping(entry, where)
    return _token_ids(_entries(entry, where, _PROMPT), where)


def _prompt_of_mapping(entry: Mapping[str, Any], where: str) -> str | list[int]:
    """Read vLLM's forms; token ids go before the text that they were made of. Other keys are refused."""
    text, ids = entry.get("prompt"), entry.get("prompt_token_ids")
    others = [key for key, value in entry.items() if key not in ("prompt", "prompt_token_ids") and value is not None]
    if others or (text is None and ids is None) or not isinstance(text, str | None):
        raise _refusal(where, entry, _PROMPT)
    if ids is None:
        return str(text)
    where = f"{where}['prompt_token_ids']"
    return _token_ids(_entries(ids, where, "a list of token ids"), where)


def _token_ids(given: list[Any], where: str) -> list[int]:
    if not given:
        raise RequestError(f"{where} is an empty list; give at least one token id", param=where.partition("[")[0])
    if all(type(i) is int for i in given):
        return given
    ids: list[int] = []
    for at, entry in enumerate(given):
        try:
            ids.append(whole(entry))
        except ValueError:
            allowed = f"a token id, a whole number; a prompt is {_PROMPT}"
            raise _refusal(f"{where}[{at}]", entry, allowed) from None
    return ids


def _is_token_id(value: Any) -> bool:
    try:
        whole(value)
    except ValueError:
        return False
    return True


def _conversation(messages: Any, where: str) -> Messages:
    given = _entries(messages, where, _CONVERSATION)
    if not given:
        raise RequestError(f"{where} is an empty list; send at least one message", param="messages")
    return [read_message(message, f"{where}[{i}]") for i, message in enumerate(given)]
