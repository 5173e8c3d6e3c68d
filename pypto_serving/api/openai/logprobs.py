"""Log-probabilities in the two shapes that OpenAI has."""

from __future__ import annotations

from typing import Any

from pypto_serving.api.openai.choice import TokenEntry


def completion_logprobs(entries: list[TokenEntry] | None) -> dict[str, Any] | None:
    """Parallel lists, one entry per token; `top_logprobs` holds the sampled token too."""
    if entries is None:
        return None
    return {
        "tokens": [_text(entry.token) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [_top_by_text(entry) for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


def chat_logprobs(entries: list[TokenEntry] | None) -> dict[str, Any] | None:
    """One object per token, with its bytes, since a token's text may be part of a character."""
    if entries is None:
        return None
    content = [
        _chat_entry(entry.token, entry.logprob) | {"top_logprobs": [_chat_entry(*pair) for pair in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _chat_entry(token: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _text(token), "logprob": logprob, "bytes": list(token)}


def _top_by_text(entry: TokenEntry) -> dict[str, float]:
    """Of tokens with the same text, which are parts of characters, the most likely one is shown."""
    found: dict[str, float] = {}
    for token, logprob in [*entry.top, (entry.token, entry.logprob)]:
        found.setdefault(_text(token), logprob)
    return found


def _text(token: bytes) -> str:
    return token.decode("utf-8", errors="replace")
