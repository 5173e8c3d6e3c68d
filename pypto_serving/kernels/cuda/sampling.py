"""Choose a token for each row of logits, without sorting the vocabulary.

A row is read in chunks of CHUNK ids, one program each; one program a row joins what they found. Greedy rows and plain
temperature need two launches: the inverse of the cumulative distribution goes through the ids in order. What a row
chooses depends on its own logits and parameters only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pypto_serving.kernels.cuda.launch import launch, power_of_two
from pypto_serving.util import ceil_div

CHUNK = 1024
NO_ID = tl.constexpr(0x7FFFFFFF)
RANDOM, TOP_P = tl.constexpr(0), tl.constexpr(1)
TEMPERATURE, FLOOR = tl.constexpr(0), tl.constexpr(1)
TOP_K, ROW, POSITION = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


class RowParameters(NamedTuple):
    """How each of n rows chooses; column i belongs to the i-th row. R is the room for rows.

    doubles [2, R]: random number, top_p. floats [2, R]: temperature (0 is greedy), lowest score that can be chosen.
    ints [3, R]: top_k, the worker's row, position of the token.
    """

    doubles: Tensor
    floats: Tensor
    ints: Tensor

    @staticmethod
    def num_bytes(rows: int) -> int:
        """Return the bytes of `over`'s memory."""
        return rows * (2 * 8 + 2 * 4 + 3 * 4)

    @classmethod
    def over(cls, memory: Tensor, rows: int) -> RowParameters:
        """Lay the columns out in `memory`, uint8, with room for `rows` rows."""
        ends = 16 * rows, 24 * rows, cls.num_bytes(rows)
        parts = memory[: ends[0]], memory[ends[0] : ends[1]], memory[ends[1] : ends[2]]
        types = torch.float64, torch.float32, torch.int32
        return cls(*(part.view(dtype).view(-1, rows) for part, dtype in zip(parts, types, strict=True)))


class Chosen(NamedTuple):
    """Where chosen tokens go, all int32: tokens [R] by row of logits; by the worker's row, last_tokens [R] and history
    [R, max_model_len], at the token's position. A token is -1 where the logits are not finite."""

    tokens: Tensor
    last_tokens: Tensor
    history: Tensor


class ChunkSums(NamedTuple):
    """What is known of each chunk of R rows, flat: `chunks` entries for each row.

    peaks float32: the largest logit, NaN if one is. ids int32: the lowest id that has it. sums float64: weights.
    """

    peaks: Tensor
    ids: Tensor
    sums: Tensor
    chunks: int

    @classmethod
    def empty(cls, rows: int, vocab: int, device: torch.device) -> ChunkSums:
        """Allocate."""
        chunks = ceil_div(vocab, CHUNK)
        types = torch.float32, torch.int32, torch.float64
        peaks, ids, sums = (torch.empty(rows * chunks, dtype=dtype, device=device) for dtype in types)
        return cls(peaks, ids, sums, chunks)


def choose(logits: Tensor, count: int, given: RowParameters, chunks: ChunkSums, out: Chosen) -> None:
    """Choose a token for the first `count` rows of logits [s, vocab]."""
    vocab, room, stride = logits.shape[1], given.ints.shape[1], logits.stride(0)
    launch(chunk_peaks, (count, chunks.chunks), logits, stride, vocab, given.floats, room, *chunks[:3], CHUNK=CHUNK)
    launch(
        choose_by_id,
        (count,),
        logits,
        stride,
        vocab,
        *given,
        room,
        *chunks,
        *out,
        out.history.shape[1],
        CHUNK=CHUNK,
        CHUNKS=power_of_two(chunks.chunks),
    )


@triton.jit
def _values(logits, stride, vocab, i, chunk, CHUNK: tl.constexpr):
    """Return the ids of a chunk of row i, and their logits; -inf beyond the vocabulary."""
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    return ids, tl.load(logits + i.to(tl.int64) * stride + ids, mask=ids < vocab, other=float("-inf"))


@triton.jit
def _temperature(floats, room, i):
    """Return the temperature of row i, and 1 for greedy rows, which need none."""
    temperature = tl.load(floats + TEMPERATURE * room + i)
    return tl.where(temperature > 0, temperature, 1.0)


@triton.jit
def _scores(values, peak, temperature):
    """Return (value - peak) / temperature; -inf where both are."""
    return tl.div_rn(values - tl.where(peak == float("-inf"), 0.0, peak), temperature)


@triton.jit
def chunk_peaks(logits, stride, vocab, floats, room, peaks, best, sums, CHUNK: tl.constexpr):
    """Find the peak of each chunk, its lowest id, and the sum of the weights exp((logit - peak) / temperature)."""
    i, chunk = tl.program_id(0), tl.program_id(1)
    ids, values = _values(logits, stride, vocab, i, chunk, CHUNK)
    peak = tl.max(values, 0)
    weights = tl.exp(_scores(values, peak, _temperature(floats, room, i)))
    at = i * tl.num_programs(1) + chunk
    unordered = tl.max((values != values).to(tl.int32), 0) > 0
    tl.store(peaks + at, tl.where(unordered, float("nan"), peak))
    tl.store(best + at, tl.min(tl.where(values == peak, ids, NO_ID), 0))
    tl.store(sums + at, tl.sum(weights.to(tl.float64), 0))


@triton.jit
def _row_peak(peaks, i, chunks, CHUNKS: tl.constexpr):
    """Return the peaks of row i's chunks, the largest, and whether the row is finite."""
    chunk = tl.arange(0, CHUNKS)
    found = tl.load(peaks + i * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    peak = tl.max(found, 0)
    unordered = tl.max((found != found).to(tl.int32), 0) > 0
    return found, peak, (unordered == 0) & (peak > float("-inf")) & (peak < float("inf"))


@triton.jit
def _store_token(token, i, ints, room, tokens, last_tokens, history, max_len):
    row, position = tl.load(ints + ROW * room + i), tl.load(ints + POSITION * room + i)
    tl.store(tokens + i, token)
    tl.store(last_tokens + row, token)
    tl.store(history + row.to(tl.int64) * max_len + position, token, mask=position < max_len)


@triton.jit
def choose_by_id(
    logits,
    stride,
    vocab,
    doubles,
    floats,
    ints,
    room,
    peaks,
    best,
    sums,
    chunks,
    tokens,
    last_tokens,
    history,
    max_len,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Choose the best token, or the first in order of id whose cumulative weight exceeds `random` of the total."""
    i = tl.program_id(0)
    found, peak, is_finite = _row_peak(peaks, i, chunks, CHUNKS)
    chunk = tl.arange(0, CHUNKS)
    live = chunk < chunks
    token = tl.min(tl.where(live & (found == peak), tl.load(best + i * chunks + chunk, mask=live, other=0), NO_ID), 0)
    if tl.load(floats + TEMPERATURE * room + i) > 0:
        temperature = _temperature(floats, room, i)
        shares = tl.load(sums + i * chunks + chunk, mask=live, other=0.0)
        shares *= tl.exp(_scores(found, peak, temperature)).to(tl.float64)
        ends = tl.cumsum(shares, 0)
        goal = tl.load(doubles + RANDOM * room + i) * tl.max(ends, 0)
        last = tl.max(tl.where(shares > 0, chunk, 0), 0)
        mine = tl.min(tl.where((ends > goal) & (shares > 0), chunk, last), 0)
        before = tl.sum(tl.where(chunk == mine, ends - shares, 0.0), 0)
        ids, values = _values(logits, stride, vocab, i, mine, CHUNK)
        weights = tl.exp(_scores(values, peak, temperature)).to(tl.float64)
        last = tl.max(tl.where(weights > 0, ids, 0), 0)
        token = tl.min(tl.where((tl.cumsum(weights, 0) + before > goal) & (weights > 0), ids, last), 0)
    _store_token(tl.where(is_finite, token, -1), i, ints, room, tokens, last_tokens, history, max_len)
