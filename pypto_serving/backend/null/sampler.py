"""Make logits from a hash, and sample from them as a device would."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from pypto_serving.backend.base import SamplingInputs
from pypto_serving.backend.null.pages import mix
from pypto_serving.backend.numpy_adjust import adjusted
from pypto_serving.backend.numpy_sampler import PlainSampler, uniforms
from pypto_serving.types.arrays import Float32Array, Int32Array
from pypto_serving.types.sampler import LogitAdjustments, Logprobs

SAMPLER = PlainSampler()


def logits_of(digest: int, vocab_size: int, fails_on: int = -1) -> Float32Array:
    """Return logits [vocab] that fall by 1 from token to token, from digest % vocab on, cyclically.

    If that token is `fails_on`, they are not finite, so the row fails.
    """
    best = digest % vocab_size
    if best == fails_on:
        return np.full(vocab_size, np.nan, np.float32)
    return -((np.arange(vocab_size) - best) % vocab_size).astype(np.float32)


def guess(token: int, digest: int, accuracy: float, vocab_size: int) -> int:
    """Return `token` with probability `accuracy`, else another token. The digest of the history decides."""
    coin = int(mix(np.array([digest], np.uint64))[0]) / 2**64
    return token if coin < accuracy else (token + 1) % vocab_size


class DeviceSampler:
    """Samples the tokens of one dispatch, row by row, from SamplingInputs alone: a reference for devices."""

    def __init__(self, inputs: SamplingInputs) -> None:
        self.inputs = inputs
        self._wanted = {"random": inputs.draws["temperature"] > 0}
        if (given := inputs.adjustments) is not None:
            self._wanted |= {"masked": given.mask_rows >= 0, **_wanted_changes(given)}
        self.is_greedy = ~np.any(list(self._wanted.values()), axis=0)

    def wants(self) -> dict[str, int]:
        """Return how many rows need each feature besides greedy sampling."""
        counts = {name: int(wanted.sum()) for name, wanted in self._wanted.items()}
        return counts | {"logprobs": int((self.inputs.num_logprobs >= 0).sum())}

    def choose(self, i: int, logits: Float32Array, position: int, sampled: Int32Array) -> int:
        """Sample the token at `position` of the i-th sampling row; -1 if `logits` [vocab] are not finite.

        `sampled` has the tokens that the device chose for the row, at their positions.
        """
        if not np.isfinite(logits.max()):
            return -1
        draw = self.inputs.draws[i : i + 1].copy()
        if draw["temperature"][0] > 0:
            draw["random"] = self._random(i, position)
        if (given := self.inputs.adjustments) is not None:
            known = given.known[i]
            history = np.concatenate([given.tokens[given.rows[i], :known], sampled[known:position]])
            logits = adjusted(logits, given, i, history)
        return int(SAMPLER.choose(logits[None], draw)[0])

    def _random(self, i: int, position: int) -> NDArray[np.float64]:
        given = self.inputs
        found = uniforms(given.seeds[i : i + 1], given.choices[i : i + 1], np.array([position], np.uint64))
        same = position == given.positions[i]
        assert not same or found[0] == given.draws["random"][i], "the host's random number differs"
        return found

    def logprobs(self, logits: Iterable[Float32Array], tokens: Int32Array) -> Logprobs | None:
        """Return log-probabilities of `tokens` [n], as wide as the largest `num_logprobs`, or None if no row asks."""
        width = int(self.inputs.num_logprobs.max(initial=-1))
        if width < 0 or not len(tokens):
            return None
        finite = [np.nan_to_num(row) for row in logits]
        order = np.arange(len(tokens), dtype=np.int32)
        return SAMPLER.logprobs(np.stack(finite), order, np.maximum(tokens, 0), width)


def _wanted_changes(given: LogitAdjustments) -> dict[str, NDArray[np.bool_]]:
    """Return which rows need each kind of change."""
    changes = given.table.changes[given.rows]
    penalties = np.stack([changes[name] for name in ("repetition", "frequency", "presence")])
    found = {
        "biased": changes["bias_from"] < changes["bias_to"],
        "banned": changes["ban_from"] < changes["ban_to"],
        "bad_words": changes["word_from"] < changes["word_to"],
        "penalized": (penalties != np.array([[1], [0], [0]])).any(axis=0),
    }
    return {name: wanted & (given.rows >= 0) for name, wanted in found.items()}
