"""Write log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from typing import Any

from pypto_serving.api.generation.logprobs import ScoredToken, TokenEntry

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks."""


def completion_logprobs(entries: list[TokenEntry] | None) -> dict[str, Any] | None:
    """Write parallel lists with one entry per token; `top_logprobs` holds the chosen token too."""
    if entries is None:
        return None
    return {
        "tokens": [_text(_utf8(entry.chosen)) for entry in entries],
        "token_logprobs": [_finite(entry.chosen) for entry in entries],
        "top_logprobs": [_top_by_text(entry) for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


def chat_logprobs(entries: list[TokenEntry] | None) -> dict[str, Any] | None:
    """Write one object per token of the content, with its bytes, since a token may be part of a character."""
    if entries is None:
        return None
    content = [
        _chat_entry(entry.chosen) | {"top_logprobs": list(map(_chat_entry, entry.top))}
        for entry in entries
        if not entry.ends
    ]
    return {"content": content, "refusal": None}


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
