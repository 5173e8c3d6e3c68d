"""The simulated device: pages with one value per token, logits from a hash of these, and sampling on the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pypto_serving.backend.base import SamplingInputs
from pypto_serving.backend.numpy_adjust import adjusted
from pypto_serving.backend.numpy_sampler import PlainSampler, uniforms
from pypto_serving.types.arrays import Float32Array, Int32Array, UInt64Array
from pypto_serving.types.kv import KVCacheGroupSpec, KVTensorSpec
from pypto_serving.types.sampler import LogitAdjustments, Logprobs
from pypto_serving.util import hash128

SAMPLER = PlainSampler()

POISON = np.uint64(0)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(values: UInt64Array) -> UInt64Array:
    """Hash with SplitMix64's finaliser (Steele, Lea, Flood 2014). The result is never 0, the poison."""
    z = values + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


def row_values(token_ids: NDArray[np.integer], positions: NDArray[np.integer]) -> UInt64Array:
    """Return the page row's value for each token and its absolute position."""
    return mix(token_ids.astype(np.uint64) + (positions.astype(np.uint64) << np.uint64(32)))


def next_digest(groups: Sequence[KVCacheGroupSpec], token_ids: Sequence[int]) -> int:
    """Hash the rows that a correct engine reads for `token_ids`; digest % vocab is the greedy next token."""
    tokens = np.asarray(token_ids, dtype=np.int64)
    last = len(tokens) - 1
    values = row_values(tokens, np.arange(len(tokens)))
    digests = []
    for group in groups:
        for tensor in group.tensors:
            if tensor.ratio == 1:
                digests.append(_digest(values[group.first_needed(last) :]))
            else:
                closed = (last + 1) // tensor.ratio
                digests.append(_digest(_fold(values[: closed * tensor.ratio], tensor.ratio)))
    return _join(digests)


def _fold(values: UInt64Array, ratio: int) -> UInt64Array:
    """Return the compressed entries, one per `ratio` rows."""
    return mix(values.reshape(-1, ratio).sum(axis=1, dtype=np.uint64))


def _digest(values: UInt64Array) -> int:
    return int(values.sum(dtype=np.uint64)) ^ len(values)


def _join(digests: Sequence[int]) -> int:
    data = b"".join(digest.to_bytes(8, "little") for digest in digests)
    return int.from_bytes(hash128(data)[:8], "little")


@dataclass(slots=True)
class Tokens:
    """Tokens to write, as arrays [t]. `owners`: row indices in `tables[g]` [r, n]; `slots[g]`: slots in group g."""

    ids: Int32Array
    positions: Int32Array
    owners: Int32Array
    slots: list[Int32Array]
    tables: Sequence[Int32Array]

    def of(self, index: slice | NDArray[np.bool_]) -> Tokens:
        """Return some of the tokens."""
        slots = [each[index] for each in self.slots]
        return Tokens(self.ids[index], self.positions[index], self.owners[index], slots, self.tables)


class SimulatedPages:
    """Owns the pages as uint64 arrays, one value per row. Page 0 is the null block.

    `arenas[g]` is [num_blocks, rows of all tensors]. The columns of tensor i start at `_columns[g][i]`.
    """

    def __init__(self, groups: tuple[KVCacheGroupSpec, ...], num_blocks: tuple[int, ...]) -> None:
        self.groups = groups
        rows = [[group.block_size // tensor.ratio for tensor in group.tensors] for group in groups]
        self._columns = [np.cumsum([0, *counts]).tolist() for counts in rows]
        self.arenas = [np.full((blocks, sum(counts)), POISON) for blocks, counts in zip(num_blocks, rows, strict=True)]

    def poison(self, fresh: Sequence[Int32Array]) -> None:
        """Poison newly allocated blocks, so that reading old content raises."""
        for arena, blocks in zip(self.arenas, fresh, strict=True):
            arena[blocks] = POISON

    def write(self, tokens: Tokens) -> None:
        """Write the rows of tokens: plain rows first, since compressed entries are computed from them."""
        values = row_values(tokens.ids, tokens.positions)
        for g, group in enumerate(self.groups):
            for i, tensor in enumerate(group.tensors):
                if tensor.ratio == 1:
                    self.arenas[g][self._place(g, i, tokens.slots[g])] = values
        for g, group in enumerate(self.groups):
            for i, tensor in enumerate(group.tensors):
                if tensor.ratio > 1:
                    self._write_entries(tokens, g, i, tensor)

    def _place(self, g: int, tensor: int, slots: Any) -> tuple[Any, Any]:
        """Return block and column of a tensor's rows for source tokens in `slots`."""
        block, offset = np.divmod(slots, self.groups[g].block_size)
        return block, self._columns[g][tensor] + offset // self.groups[g].tensors[tensor].ratio

    def _write_entries(self, tokens: Tokens, g: int, i: int, tensor: KVTensorSpec) -> None:
        """Write the compressed entries that these tokens complete."""
        closing = np.flatnonzero((tokens.positions + 1) % tensor.ratio == 0)
        source = next(s for s, group in enumerate(self.groups) if group.name == tensor.folded_from)
        for index in closing:
            end = int(tokens.positions[index]) + 1
            rows = self._read(tokens.tables[source][tokens.owners[index]], source, end - tensor.ratio, end)
            self.arenas[g][self._place(g, i, tokens.slots[g][index])] = _fold(rows, tensor.ratio)[0]

    def digest(self, tables: Sequence[Int32Array], position: int) -> int:
        """Hash the rows that a query at `position` reads through a row's block tables, `tables[g]` [n].

        Raises RuntimeError if a row is in the null block, or was not written since its block was allocated.
        """
        digests = []
        for g, group in enumerate(self.groups):
            for i, tensor in enumerate(group.tensors):
                end = (position + 1) // tensor.ratio * tensor.ratio
                start = group.first_needed(position) if tensor.ratio == 1 else 0
                digests.append(_digest(self._read(tables[g], g, start, end, i)))
        return _join(digests)

    def _read(self, table: Int32Array, g: int, start: int, end: int, tensor: int = 0) -> UInt64Array:
        """Read rows of positions [start, end) through a table."""
        group, ratio = self.groups[g], self.groups[g].tensors[tensor].ratio
        index, offset = np.divmod(np.arange(start, end, ratio), group.block_size)
        blocks: Int32Array = table[index]
        values: UInt64Array = self.arenas[g][blocks, self._columns[g][tensor] + offset // ratio]
        if not blocks.all() or (values == POISON).any():
            raise RuntimeError(f"group {group.name}: a row of positions [{start}, {end}) is read but was not written")
        return values


def logits_of(digest: int, vocab_size: int, fails_on: int = -1) -> Float32Array:
    """Return logits [vocab] that decrease by 1 from token to token, cyclically from digest % vocab on.

    If that token is `fails_on`, the logits are not finite, so the row fails.
    """
    best = digest % vocab_size
    if best == fails_on:
        return np.full(vocab_size, np.nan, np.float32)
    return -((np.arange(vocab_size) - best) % vocab_size).astype(np.float32)


def guess(token: int, digest: int, accuracy: float, vocab_size: int) -> int:
    """Return `token` with probability `accuracy`, else another token; deterministic in `digest`."""
    coin = int(mix(np.array([digest], np.uint64))[0]) / 2**64
    return token if coin < accuracy else (token + 1) % vocab_size


class SimulatedSampler:
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
