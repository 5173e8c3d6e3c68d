"""Choose a token for each row of logits, without sorting the vocabulary.

A row is read in chunks of CHUNK ids, one program each; one program a row joins what they found. Greedy rows and plain
temperature need two launches: the inverse of the cumulative distribution goes through the ids in order. Rows with top_k
or top_p take out the best tokens one by one, up to LIMIT. Those that need more search for the score at which a count
or a weight is reached. What a row chooses depends on its own logits and parameters only.

A score is (logit - peak) / temperature, at most 0; a weight is exp(score). The bits of a score's magnitude, read as an
integer, ascend from best to worst; with the id below them they are the key of a token, which no other one has.
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
LIMIT = 128
"""Tokens that a row takes out one by one."""
WAYS = 8
"""Scores that a pass of a search compares with."""
LOWEST_SCORE = -87.0
"""Lower scores have no weight."""
NO_ID = tl.constexpr(0x7FFFFFFF)
NO_KEY = tl.constexpr(0x7FFFFFFFFFFFFFFF)
RANDOM, TOP_P = tl.constexpr(0), tl.constexpr(1)
TEMPERATURE, FLOOR = tl.constexpr(0), tl.constexpr(1)
TOP_K, ROW, POSITION, NUM_LOGPROBS, CHANGED, MASK = (tl.constexpr(i) for i in range(6))


class RowParameters(NamedTuple):
    """How each of n rows chooses; column i belongs to the i-th row. R is the room for rows.

    doubles [2, R]: random number, top_p. floats [2, R]: temperature (0 is greedy), and the lowest score to choose:
    -inf in rows without filters, LOWEST_SCORE or above in others. ints [6, R]: top_k, the worker's row, position of the
    token, num_logprobs, the worker's row again if it has changes (else -1), its mask (or -1).
    """

    doubles: Tensor
    floats: Tensor
    ints: Tensor

    @staticmethod
    def num_bytes(rows: int) -> int:
        """Return the bytes of `over`'s memory."""
        return rows * (2 * 8 + 2 * 4 + 6 * 4)

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

    peaks float32: the largest logit, NaN if one is. ids int32: the lowest id that has it. sums float64: weights, by
    scores of the chunk's peak, or of the row's peak in rows with filters. keys int64: the best key, in these rows only.
    """

    peaks: Tensor
    ids: Tensor
    sums: Tensor
    keys: Tensor
    chunks: int

    @classmethod
    def empty(cls, rows: int, vocab: int, device: torch.device) -> ChunkSums:
        """Allocate."""
        chunks = ceil_div(vocab, CHUNK)
        types = torch.float32, torch.int32, torch.float64, torch.int64
        peaks, ids, sums, keys = (torch.empty(rows * chunks, dtype=dtype, device=device) for dtype in types)
        return cls(peaks, ids, sums, keys, chunks)


class Filters(NamedTuple):
    """Which filters any row has."""

    any: bool
    ranked: bool
    """top_k or top_p."""
    searched: bool
    """May need more than LIMIT tokens."""


def choose(logits: Tensor, count: int, given: RowParameters, filters: Filters, chunks: ChunkSums, out: Chosen) -> None:
    """Choose a token for the first `count` rows of logits [s, vocab]."""
    vocab, room, stride = logits.shape[1], given.ints.shape[1], logits.stride(0)
    read = logits, stride, vocab
    sizes = {"CHUNK": CHUNK, "CHUNKS": power_of_two(chunks.chunks)}
    rest = *given, room, *chunks, *out, out.history.shape[1]
    launch(chunk_peaks, (count, chunks.chunks), *read, given.floats, room, *chunks[:3], CHUNK=CHUNK)
    if filters.any:
        launch(chunk_scores, (count, chunks.chunks), *read, given.floats, room, *chunks, **sizes)
    launch(choose_by_id, (count,), *read, *rest, **sizes)
    if filters.ranked:
        launch(choose_best_first, (count,), *read, *rest, **sizes, LIMIT=LIMIT, num_warps=1)
    if filters.searched:
        launch(choose_by_search, (count,), *read, *rest, **sizes, WAYS=WAYS, num_warps=8)


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
def _weights(scores, floor):
    """Return the weights of scores, 0 for those below `floor`."""
    return tl.where(scores >= floor, tl.exp(scores), 0.0).to(tl.float64)


@triton.jit
def _magnitudes(scores):
    """Return the bits of the scores' magnitudes."""
    return scores.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _weight(magnitude):
    """Return the weight of one score."""
    return tl.exp(-magnitude.to(tl.float32, bitcast=True)).to(tl.float64)


@triton.jit
def _keys(scores, ids, floor):
    """Return the keys of tokens, NO_KEY for scores below `floor`."""
    return tl.where(scores >= floor, (_magnitudes(scores).to(tl.int64) << 32) | ids, NO_KEY)


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
def _is_ranked(doubles, ints, room, i):
    return (tl.load(ints + TOP_K * room + i) > 0) | (tl.load(doubles + TOP_P * room + i) < 1)


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
    keys,
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
    if _is_ranked(doubles, ints, room, i):
        return
    found, peak, is_finite = _row_peak(peaks, i, chunks, CHUNKS)
    chunk = tl.arange(0, CHUNKS)
    live = chunk < chunks
    token = tl.min(tl.where(live & (found == peak), tl.load(best + i * chunks + chunk, mask=live, other=0), NO_ID), 0)
    if tl.load(floats + TEMPERATURE * room + i) > 0:
        temperature = _temperature(floats, room, i)
        shares = tl.load(sums + i * chunks + chunk, mask=live, other=0.0)
        floor = tl.load(floats + FLOOR * room + i)
        if floor == float("-inf"):
            shares *= tl.exp(_scores(found, peak, temperature)).to(tl.float64)
        ends = tl.cumsum(shares, 0)
        goal = tl.load(doubles + RANDOM * room + i) * tl.max(ends, 0)
        last = tl.max(tl.where(shares > 0, chunk, 0), 0)
        mine = tl.min(tl.where((ends > goal) & (shares > 0), chunk, last), 0)
        before = tl.sum(tl.where(chunk == mine, ends - shares, 0.0), 0)
        ids, values = _values(logits, stride, vocab, i, mine, CHUNK)
        weights = _weights(_scores(values, peak, temperature), floor)
        last = tl.max(tl.where(weights > 0, ids, 0), 0)
        token = tl.min(tl.where((tl.cumsum(weights, 0) + before > goal) & (weights > 0), ids, last), 0)
    _store_token(tl.where(is_finite, token, -1), i, ints, room, tokens, last_tokens, history, max_len)


@triton.jit
def chunk_scores(
    logits, stride, vocab, floats, room, peaks, best, sums, keys, chunks, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    """Find the best key of each chunk and its sum of weights, in rows with filters."""
    i, chunk = tl.program_id(0), tl.program_id(1)
    floor = tl.load(floats + FLOOR * room + i)
    if floor == float("-inf"):
        return
    _, peak, _ = _row_peak(peaks, i, chunks, CHUNKS)
    ids, values = _values(logits, stride, vocab, i, chunk, CHUNK)
    scores = _scores(values, peak, _temperature(floats, room, i))
    tl.store(keys + i * chunks + chunk, tl.min(_keys(scores, ids, floor), 0))
    tl.store(sums + i * chunks + chunk, tl.sum(_weights(scores, floor), 0))


@triton.jit
def choose_best_first(
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
    keys,
    chunks,
    tokens,
    last_tokens,
    history,
    max_len,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Choose the first token, best first, whose cumulative weight exceeds `random` of that of top_k and top_p.

    Where LIMIT tokens do not suffice, the token becomes -2.
    """
    i = tl.program_id(0)
    if _is_ranked(doubles, ints, room, i) == 0:
        return
    _, peak, is_finite = _row_peak(peaks, i, chunks, CHUNKS)
    temperature, floor = _temperature(floats, room, i), tl.load(floats + FLOOR * room + i)
    top_k, top_p = tl.load(ints + TOP_K * room + i), tl.load(doubles + TOP_P * room + i)
    chunk, slots = tl.arange(0, CHUNKS), tl.arange(0, LIMIT)
    live = chunk < chunks
    total = tl.sum(tl.load(sums + i * chunks + chunk, mask=live, other=0.0), 0)
    firsts = tl.load(keys + i * chunks + chunk, mask=live, other=NO_KEY)
    taken, ends = tl.zeros([LIMIT], tl.int32), tl.zeros([LIMIT], tl.float64)
    count, end = 0, total * 0
    key = tl.min(firsts, 0)
    lacks = is_finite
    goes_on = lacks & (top_k <= LIMIT)
    while goes_on:
        token = (key & 0xFFFFFFFF).to(tl.int32)
        end += _weight((key >> 32).to(tl.int32))
        taken, ends = tl.where(slots == count, token, taken), tl.where(slots == count, end, ends)
        count += 1
        ids, values = _values(logits, stride, vocab, i, token // CHUNK, CHUNK)
        others = _keys(_scores(values, peak, temperature), ids, floor)
        firsts = tl.where(chunk == token // CHUNK, tl.min(tl.where(others > key, others, NO_KEY), 0), firsts)
        key = tl.min(firsts, 0)
        lacks = (key < NO_KEY) & tl.where(top_k > 0, count < top_k, end < top_p * total)
        goes_on = lacks & (count < LIMIT)
    if lacks:
        tl.store(tokens + i, -2)
        return
    wanted = top_p * tl.where(top_k > 0, end, total)
    last = tl.min(tl.where((slots < count) & (ends >= wanted), slots, count - 1), 0)
    goal = tl.load(doubles + RANDOM * room + i) * tl.sum(tl.where(slots == last, ends, 0.0), 0)
    at = tl.min(tl.where((slots < count) & (ends > goal), slots, last), 0)
    token = tl.sum(tl.where(slots == at, taken, 0), 0)
    _store_token(tl.where(is_finite, token, -1), i, ints, room, tokens, last_tokens, history, max_len)


@triton.jit
def _search(
    logits,
    stride,
    vocab,
    i,
    keys,
    chunks,
    peak,
    temperature,
    high,
    enough,
    least,
    above,
    CHUNK: tl.constexpr,
    WAYS: tl.constexpr,
):
    """Find the lowest magnitude up to which `enough` scores have a weight of at least `least`, and more than `above`.

    It is `high` if none below is. Return it, the count and weight of better scores, and the count of equal ones.
    """
    ways = tl.arange(0, WAYS)
    low, better, before, upto = 0, 0, least * 0, 0
    goes_on = True
    while goes_on:
        step = (high - low) // WAYS + 1
        limits = tl.minimum(low + step * (ways + 1) - 1, high)
        counts, weights = tl.zeros([CHUNK, WAYS], tl.int32), tl.zeros([CHUNK, WAYS], tl.float64)
        for chunk in range(chunks):
            if (tl.load(keys + i * chunks + chunk) >> 32) <= high:
                _, values = _values(logits, stride, vocab, i, chunk, CHUNK)
                scores = _scores(values, peak, temperature)
                within = _magnitudes(scores)[:, None] <= limits[None, :]
                counts += within.to(tl.int32)
                weights += tl.where(within, tl.exp(scores)[:, None], 0.0).to(tl.float64)
        count, weight = tl.sum(counts, 0), tl.sum(weights, 0)
        holds = (count >= enough) & (weight >= least) & (weight > above)
        first = tl.min(tl.where(holds, ways, WAYS - 1), 0)
        if first > 0:
            low += step * first
            better = tl.sum(tl.where(ways == first - 1, count, 0), 0)
            before = tl.sum(tl.where(ways == first - 1, weight, 0.0), 0)
        high = tl.sum(tl.where(ways == first, limits, 0), 0)
        upto = tl.sum(tl.where(ways == first, count, 0), 0)
        goes_on = low < high
    return high, better, before, upto - better


@triton.jit
def choose_by_search(
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
    keys,
    chunks,
    tokens,
    last_tokens,
    history,
    max_len,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    WAYS: tl.constexpr,
):
    """Choose as `choose_best_first` does, where the token is -2, whatever the number of tokens.

    Tokens of equal score are taken in order of id, so of the last score a filter may leave some.
    """
    i = tl.program_id(0)
    if tl.load(tokens + i) != -2:
        return
    _, peak, _ = _row_peak(peaks, i, chunks, CHUNKS)
    temperature = _temperature(floats, room, i)
    top_k, top_p = tl.load(ints + TOP_K * room + i), tl.load(doubles + TOP_P * room + i)
    chunk = tl.arange(0, CHUNKS)
    total = tl.sum(tl.load(sums + i * chunks + chunk, mask=chunk < chunks, other=0.0), 0)
    most, none = _magnitudes(tl.load(floats + FLOOR * room + i)), total * 0 - 1
    left = vocab
    if top_k > 0:
        most, better, before, equal = _search(
            logits, stride, vocab, i, keys, chunks, peak, temperature, most, top_k, none, none, CHUNK, WAYS
        )
        left = tl.minimum(top_k - better, equal)
        total = before + left * _weight(most)
    if top_p < 1:
        wanted = top_p * total
        found, better, before, equal = _search(
            logits, stride, vocab, i, keys, chunks, peak, temperature, most, 0, wanted, none, CHUNK, WAYS
        )
        left = tl.where(found == most, tl.minimum(left, equal), equal)
        most = found
        share = tl.ceil((wanted - before) / _weight(most))
        left = tl.maximum(tl.minimum(left, share.to(tl.int32)), 1)
        total = before + left * _weight(most)
    goal = tl.load(doubles + RANDOM * room + i) * total
    found, better, before, equal = _search(
        logits, stride, vocab, i, keys, chunks, peak, temperature, most, 0, none, goal, CHUNK, WAYS
    )
    left = tl.where(found == most, tl.minimum(left, equal), equal)
    nth = tl.floor((goal - before) / _weight(found)).to(tl.int32) + 1
    nth = tl.maximum(tl.minimum(nth, left), 1)
    token = NO_ID
    for chunk in range(chunks):
        if (tl.load(keys + i * chunks + chunk) >> 32) <= found:
            ids, values = _values(logits, stride, vocab, i, chunk, CHUNK)
            same = _magnitudes(_scores(values, peak, temperature)) == found
            place = tl.cumsum(same.to(tl.int32), 0)
            token = tl.minimum(token, tl.min(tl.where(same & (place == nth), ids, NO_ID), 0))
            nth -= tl.max(place, 0)
    _store_token(token, i, ints, room, tokens, last_tokens, history, max_len)
