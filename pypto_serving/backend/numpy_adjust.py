"""Adjust logits in numpy, row by row, as defined in `types/sampler.py`: the reference for kernels and devices."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pypto_serving.types.arrays import Float32Array, Int32Array
from pypto_serving.types.sampler import LogitAdjustments


def adjusted(logits: Float32Array, given: LogitAdjustments, i: int, history: Int32Array) -> Float32Array:
    """Return an adjusted copy of logits [vocab] for the i-th entry of `given`. `history`: its tokens so far."""
    scores, row = logits.copy(), int(given.rows[i])
    if row >= 0:
        change, table = given.table.changes[row], given.table
        biases = slice(change["bias_from"], change["bias_to"])
        np.add.at(scores, table.bias_ids[biases], table.bias_values[biases])
        _penalize(scores, history, change)
    if given.mask_rows[i] >= 0:
        bits = np.unpackbits(given.masks[given.mask_rows[i]].view(np.uint8), bitorder="little")
        scores = _without(scores, np.flatnonzero(bits[: len(scores)] == 0))
    return scores if row < 0 else _without(scores, _banned(given, row, history))


def _penalize(scores: Float32Array, history: Int32Array, change: np.void) -> None:
    if change["repetition"] != 1:
        seen = np.unique(history)
        values = scores[seen]
        scores[seen] = np.where(values > 0, values / change["repetition"], values * change["repetition"])
    found, counts = np.unique(history[change["prompt_len"] :], return_counts=True)
    scores[found] -= change["frequency"] * counts.astype(np.float32)
    scores[found] -= change["presence"]


def _banned(given: LogitAdjustments, row: int, history: Int32Array) -> NDArray[np.int64]:
    """Return the ids that would complete a bad word after `history`, and the ids banned at its position."""
    change, table = given.table.changes[row], given.table
    output = history[change["prompt_len"] :].tolist()
    banned: list[int] = []
    if len(history) < change["banned_until"]:
        banned += table.banned_ids[change["ban_from"] : change["ban_to"]].tolist()
    for word in range(change["word_from"], change["word_to"]):
        *before, last = table.words[table.word_starts[word] : table.word_starts[word + 1]].tolist()
        if not before or output[-len(before) :] == before:
            banned.append(last)
    return np.array(banned, np.int64)


def _without(scores: Float32Array, ids: NDArray[np.int64]) -> Float32Array:
    """Return a copy in which `ids` cannot be chosen, or `scores` if no other id could be."""
    left = scores.copy()
    left[ids[ids < len(scores)]] = -np.inf
    return left if np.isfinite(left.max()) else scores
