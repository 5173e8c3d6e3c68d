"""Truncate prompts that are too long, where the request allows it."""

from __future__ import annotations

from collections.abc import Sequence


def truncate(
    token_ids: Sequence[int], limit: int | None, max_tokens: int | None, max_model_len: int
) -> tuple[Sequence[int], int]:
    """Return the end of a prompt and how many tokens were cut off before it.

    Keep the last `limit` tokens; for -1 as many as fit the context with `max_tokens` output tokens, or with one. None
    keeps all.
    """
    if limit is None:
        return token_ids, 0
    if limit < 0:
        limit = max(1, max_model_len - max(1, 1 if max_tokens is None else max_tokens))
    num_cut = max(0, len(token_ids) - limit)
    return token_ids[num_cut:], num_cut
