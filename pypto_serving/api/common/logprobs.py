"""Write log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, overload

import msgspec

from pypto_serving.api.generation.logprobs import ScoredToken, TokenEntry

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks."""


@overload
def completion_logprobs(entries: Iterable[TokenEntry], shift: int = 0) -> dict[str, list[Any]]: ...


@overload
def completion_logprobs(entries: None, shift: int = 0) -> None: ...


def completion_logprobs(entries: Iterable[TokenEntry] | None, shift: int = 0) -> dict[str, list[Any]] | None:
    """Write parallel lists with one entry per token; `top_logprobs` holds the chosen token too.

    Offsets are moved by `shift`.
    """
    if entries is None:
        return None
    found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for entry in entries:
        found["tokens"].append(_text(_utf8(entry.chosen)))
        found["token_logprobs"].append(_finite(entry.chosen) if entry.scored else None)
        found["top_logprobs"].append(_top_by_text(entry) if entry.scored else None)
        found["text_offset"].append(shift + entry.offset)
    return found


def prompt_logprobs(entries: Iterable[TokenEntry]) -> list[dict[str, Any] | None]:
    """Write vLLM's form: for each token of a prompt those of the token and of the most likely ones, by token id."""
    return [_by_id(entry) if entry.scored else None for entry in entries]


def _by_id(entry: TokenEntry) -> dict[str, Any]:
    tokens = {token.token_id: token for token in (entry.chosen, *entry.top)}
    return {str(token_id): _described(token) for token_id, token in tokens.items()}


def _described(token: ScoredToken) -> dict[str, Any]:
    return {"logprob": _finite(token), "rank": token.rank, "decoded_token": _text(_utf8(token))}


def chat_logprobs(entries: list[TokenEntry] | None) -> dict[str, Any] | None:
    """Write one object per token of the content, with its bytes, since a token may be part of a character.

    Each is JSON already: as objects of Python, those of a long answer would take five times the memory.
    """
    if entries is None:
        return None
    content = [msgspec.Raw(msgspec.json.encode(_chat_position(entry))) for entry in entries if not entry.ends]
    return {"content": content, "refusal": None}


def _chat_position(entry: TokenEntry) -> dict[str, Any]:
    return _chat_entry(entry.chosen) | {"top_logprobs": list(map(_chat_entry, entry.top))}


def _chat_entry(token: ScoredToken) -> dict[str, Any]:
    utf8 = _utf8(token)
    return {"token": _text(utf8), "logprob": _finite(token), "bytes": list(utf8)}


def _top_by_text(entry: TokenEntry) -> dict[str, float]:
    """Of tokens with the same text, which are parts of characters, show the most likely one."""
    found: dict[str, float] = {}
    for token in [*entry.top, entry.chosen]:
        found.setdefault(_text(_utf8(token)), _finite(token))
    return found


def _utf8(token: ScoredToken) -> bytes:
    return f"token_id:{token.token_id}".encode() if token.utf8 is None else token.utf8


def _text(utf8: bytes) -> str:
    return utf8.decode("utf-8", errors="replace")


def _finite(token: ScoredToken) -> float:
    return max(token.logprob, LOWEST_LOGPROB)
