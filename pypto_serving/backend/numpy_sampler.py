"""Sample in numpy: for programs without a sampler, and as the reference for the kernels' sampler."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pypto_serving.backend.numpy_adjust import adjusted
from pypto_serving.types.arrays import Float32Array, Int32Array, UInt64Array
from pypto_serving.types.sampler import LogitAdjustments, Logprobs

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
ROUNDS = 10
_WEYL = np.arange(ROUNDS, dtype=np.uint64)[:, None, None] * np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)


def philox4x32(counters: UInt64Array, keys: UInt64Array) -> UInt64Array:
    """Return random words [4, n] for counters [4, n] and keys [2, n]; all are 32-bit numbers in uint64."""
    even, odd = counters[::2], counters[1::2]
    for round_keys in keys + _WEYL & _LOW:
        products = even * _MULTIPLIERS
        even = (products >> _HALF)[::-1] ^ odd ^ round_keys
        odd = (products & _LOW)[::-1]
    return np.stack([even[0], odd[0], even[1], odd[1]])


def uniforms(seeds: UInt64Array, choices: UInt64Array, positions: UInt64Array, draw: int = 0) -> NDArray[np.float64]:
    """Return float64 [n] in [0, 1) with 53 random bits, for n seeds, choices and absolute positions."""
    counters = np.empty((4, len(positions)), np.uint64)
    counters[0], counters[1], counters[2], counters[3] = positions & _LOW, draw, choices & _LOW, positions >> _HALF
    keys = np.empty((2, len(positions)), np.uint64)
    keys[0], keys[1] = seeds & _LOW, seeds >> _HALF
    words = philox4x32(counters, keys)
    bits = ((words[0] >> np.uint64(5)) << np.uint64(26)) | (words[1] >> np.uint64(6))
    found: NDArray[np.float64] = bits.astype(np.float64) / float(1 << 53)
    return found


HEAD = 1024
"""Top-p sorts this many best candidates, and the whole vocabulary only if these do not suffice."""


class PlainSampler:
    """The reference sampler. Implements Sampler, row by row."""

    def choose(
        self, logits: Float32Array, draws: NDArray[np.void], adjustments: LogitAdjustments | None = None
    ) -> Int32Array:
        """Implement Sampler."""
        tokens = _greedy(logits)
        if adjustments is not None:
            logits = _adjusted(logits, adjustments, tokens)
            tokens = np.where(tokens >= 0, _greedy(logits), -1)
        for i in np.flatnonzero((draws["temperature"] > 0) & (tokens >= 0)):
            tokens[i] = _draw(logits[i], draws[i])
        return tokens

    def logprobs(self, logits: Float32Array, rows: Int32Array, tokens: Int32Array, width: int) -> Logprobs:
        """Implement Sampler."""
        found = Logprobs.empty(len(rows), min(width, logits.shape[1]))
        for i, (row, token) in enumerate(zip(rows.tolist(), tokens.tolist(), strict=True)):
            raw = logits[row]
            shifted = raw.astype(np.float64) - float(raw.max())
            logprobs = shifted - math.log(np.exp(shifted).sum())
            found.values[i], found.ranks[i] = logprobs[token], (raw > raw[token]).sum() + 1
            if width:
                found.best_ids[i] = _best(raw, width)
                found.best_values[i] = logprobs[found.best_ids[i]]
        return found


def _greedy(logits: Float32Array) -> Int32Array:
    """Return the lowest best token of each row, or -1 if the row's logits are not finite."""
    best = logits.argmax(axis=1)
    top = logits[np.arange(len(best)), best]
    return np.where(np.isfinite(top), best, -1).astype(np.int32)


def _adjusted(logits: Float32Array, given: LogitAdjustments, tokens: Int32Array) -> Float32Array:
    """Return a copy of the logits, adjusted in rows whose token is not -1."""
    changed = logits.copy()
    for i in np.flatnonzero((tokens >= 0) & ((given.rows >= 0) | (given.mask_rows >= 0))).tolist():
        changed[i] = adjusted(logits[i], given, i, given.tokens[given.rows[i], : given.positions[i]])
    return changed


def _draw(logits: Float32Array, draw: np.void) -> int:
    """Sample by inverting the cumulative distribution, in order of id; with top_k or top_p, best first."""
    top_k, top_p, random = int(draw["top_k"]), float(draw["top_p"]), float(draw["random"])
    scores = (logits - logits.max()) / draw["temperature"]
    if draw["min_p"] > 0:
        scores = np.where(scores >= np.float32(math.log(draw["min_p"])), scores, np.float32(-np.inf))
    if top_k == 0 and top_p == 1:
        return _invert(np.cumsum(np.exp(scores), dtype=np.float64), random)
    if top_k:
        ids = _best(scores, top_k)
        total = None
    else:
        ids = _best(scores, HEAD)
        total = float(np.exp(scores).sum(dtype=np.float64))
    cumulative = np.cumsum(np.exp(scores[ids]), dtype=np.float64)
    if total is not None and cumulative[-1] < top_p * total:
        ids = np.lexsort((np.arange(len(scores)), -scores))
        cumulative = np.cumsum(np.exp(scores[ids]), dtype=np.float64)
    if top_p < 1:
        wanted = top_p * (cumulative[-1] if total is None else total)
        cumulative = cumulative[: int(np.searchsorted(cumulative, wanted)) + 1]
    return int(ids[_invert(cumulative, random)])


def _invert(cumulative: NDArray[np.float64], random: float) -> int:
    """Return the first index whose cumulative weight exceeds `random` of the total."""
    index = int(np.searchsorted(cumulative, random * cumulative[-1], side="right"))
    return min(index, int(np.searchsorted(cumulative, cumulative[-1])))


def _best(scores: Float32Array, count: int) -> NDArray[np.intp]:
    """Return the ids of the `count` best scores, best first, ties to the lowest id."""
    if count >= len(scores):
        candidates = np.arange(len(scores))
    else:
        candidates = np.flatnonzero(scores >= np.partition(scores, len(scores) - count)[len(scores) - count])
    return candidates[np.lexsort((candidates, -scores[candidates]))][:count]
