"""Read prompts, conversations and sampling parameters as programs write them. Raises RequestError for all else."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pypto_serving.errors import RequestError
from pypto_serving.types.sampling import SamplingParams
from pypto_serving.util import brief

Prompt = str | Sequence[int] | npt.NDArray[np.integer[Any]] | Mapping[str, Any]
"""A text, token ids, or vLLM's `{"prompt": text}` or `{"prompt_token_ids": ids}`."""
Messages = Sequence[Mapping[str, Any]]

_PROMPT = "a text, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}"
_CONVERSATION = "a list of messages such as {'role': 'user', 'content': 'Hello'}"
_MAY_LACK_CONTENT = frozenset({"assistant", "tool", "function"})


def read_prompts(prompts: Any) -> list[str | list[int]]:
    """List the prompts as texts or token ids; a list that starts with an integer is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [_prompt(prompts, "prompts")]
    entries = _entries(prompts)
    if entries is None:
        raise _refusal("prompts", prompts, f"a prompt or a list of prompts; a prompt is {_PROMPT}")
    if entries and _token_id(entries[0]) is not None:
        return [_token_ids(entries, "prompts")]
    return [_prompt(entry, f"prompts[{i}]") for i, entry in enumerate(entries)]


def read_conversations(messages: Any) -> list[Messages]:
    """List the conversations; a list that starts with a message is one conversation."""
    entries = _entries(messages)
    if entries is None:
        raise _refusal("messages", messages, f"{_CONVERSATION}, or a list of such lists")
    if not entries or isinstance(entries[0], Mapping):
        return [_conversation(entries, "messages")]
    return [_conversation(entry, f"messages[{i}]") for i, entry in enumerate(entries)]


def read_conversation(messages: Any) -> Messages:
    """Return the only conversation."""
    return _conversation(messages, "messages")


def read_params(given: Any, count: int) -> list[SamplingParams]:
    """List the parameters of each of `count` prompts: one for all, or one for each."""
    if isinstance(given, SamplingParams):
        return [given] * count
    params = _entries(given)
    if params is None:
        raise _refusal("sampling_params", given, "a SamplingParams or a list of them")
    for i, one in enumerate(params):
        if not isinstance(one, SamplingParams):
            raise _refusal(f"sampling_params[{i}]", one, "a SamplingParams")
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling_params for {count} prompts; give one, or one for each")
    return params


def read_template_kwargs(given: Any) -> Mapping[str, Any]:
    """Return the chat_template_kwargs, none for None."""
    if not isinstance(given, Mapping | None):
        raise _refusal("chat_template_kwargs", given, "a mapping from names to values")
    return given or {}


def _refusal(where: str, value: object, allowed: str) -> RequestError:
    return RequestError(f"{where} is {brief(value)}, but must be {allowed}", param=where.partition("[")[0])


def _entries(value: Any) -> list[Any] | None:
    """List what `value` holds, or return None for a text, bytes, a mapping, or what holds nothing."""
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping):
        return None
    try:
        return list(value)
    except TypeError:
        return None


def _prompt(entry: Any, where: str) -> str | list[int]:
    if isinstance(entry, str):
        return entry
    if isinstance(entry, Mapping):
        return _prompt_of_mapping(entry, where)
    ids = _entries(entry)
    if ids is None:
        raise _refusal(where, entry, _PROMPT)
    return _token_ids(ids, where)


def _prompt_of_mapping(entry: Mapping[str, Any], where: str) -> str | list[int]:
    """Read vLLM's forms; token ids go before the text that they were made of. Other keys are refused."""
    text, ids = entry.get("prompt"), entry.get("prompt_token_ids")
    others = [key for key, value in entry.items() if key not in ("prompt", "prompt_token_ids") and value is not None]
    if others or (text is None and ids is None) or not isinstance(text, str | None):
        raise _refusal(where, entry, _PROMPT)
    if ids is None:
        return str(text)
    entries = _entries(ids)
    if entries is None:
        raise _refusal(f"{where}['prompt_token_ids']", ids, "a list of token ids")
    return _token_ids(entries, f"{where}['prompt_token_ids']")


def _token_ids(entries: list[Any], where: str) -> list[int]:
    if not entries:
        raise RequestError(f"{where} is an empty list; give at least one token id", param=where.partition("[")[0])
    if all(type(i) is int for i in entries):
        return entries
    ids: list[int] = []
    for at, entry in enumerate(entries):
        token_id = _token_id(entry)
        if token_id is None:
            raise _refusal(f"{where}[{at}]", entry, f"a token id, a whole number; a prompt is {_PROMPT}")
        ids.append(token_id)
    return ids


def _token_id(value: Any) -> int | None:
    """Return a whole number of Python or numpy as an int, None for all else."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _conversation(messages: Any, where: str) -> Messages:
    entries = _entries(messages)
    if entries is None:
        raise _refusal(where, messages, _CONVERSATION)
    if not entries:
        raise RequestError(f"{where} is an empty list; send at least one message", param="messages")
    for i, message in enumerate(entries):
        _check_message(message, f"{where}[{i}]")
    return entries


def _check_message(message: Any, where: str) -> None:
    """Refuse what no encoder can read; as in HTTP, only the turns of the assistant and of tools may lack content."""
    if not isinstance(message, Mapping):
        raise _refusal(where, message, "a message with role and content, such as {'role': 'user', 'content': 'Hello'}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise _missing_or_wrong(f"{where}.role", role)
    if not isinstance(content, str | list | tuple) and (content is not None or role not in _MAY_LACK_CONTENT):
        raise _missing_or_wrong(f"{where}.content", content)


def _missing_or_wrong(where: str, value: object) -> RequestError:
    if value is None:
        return RequestError(f"{where} is missing; a message has role and content, both text", param="messages")
    return _refusal(where, value, "text; a message has role and content")
