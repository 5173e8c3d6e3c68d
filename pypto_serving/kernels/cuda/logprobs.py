"""Log-probabilities of chosen tokens and of the best ones, as parts that the host joins in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pypto_serving.kernels.cuda import sampling
from pypto_serving.kernels.cuda.launch import launch, power_of_two
from pypto_serving.kernels.cuda.sampling import (
    NO_KEY,
    NUM_LOGPROBS,
    ChunkSums,
    RowParameters,
    _row_peak,
    _scores,
    _values,
)
from pypto_serving.types.sampling import MAX_LOGPROBS


class Results(NamedTuple):
    """What goes back to the host, by row of logits. Log-probabilities are logits - peak - log(sum).

    tokens, ranks int32 [R]; sums float64 [R]: of exp(logit - peak). peaks, values float32 [R]: the best logit and the
    token's. best_ids int32, best_values float32 [R, MAX_LOGPROBS]: the best tokens and their logits.
    """

    tokens: Tensor
    ranks: Tensor
    sums: Tensor
    peaks: Tensor
    values: Tensor
    best_ids: Tensor
    best_values: Tensor

    @staticmethod
    def num_bytes(rows: int) -> int:
        """Return the bytes of `over`'s memory."""
        return rows * (4 + 4 + 8 + 4 + 4 + 8 * MAX_LOGPROBS)

    @classmethod
    def over(cls, memory: Tensor, rows: int) -> Results:
        """Lay the fields out in `memory`, uint8, with room for `rows` rows. Tokens come first."""
        wide = 4 * MAX_LOGPROBS
        parts = memory[: cls.num_bytes(rows)].split([rows * size for size in (4, 4, 8, 4, 4, wide, wide)])
        ints, floats = torch.int32, torch.float32
        types = ints, ints, torch.float64, floats, floats, ints, floats
        flat = [part.view(dtype) for part, dtype in zip(parts, types, strict=True)]
        return cls(*flat[:5], *(each.view(rows, MAX_LOGPROBS) for each in flat[5:]))


def find_logprobs(
    logits: Tensor, count: int, width: int, given: RowParameters, chunks: ChunkSums, out: Results
) -> None:
    """Find them in rows that ask for any and have a token, with the `width` best. `chunks` is overwritten."""
    vocab, stride = logits.shape[1], logits.stride(0)
    read = logits, stride, vocab, given.ints, given.ints.shape[1], out.tokens, *chunks
    launch(chunk_logprobs, (count, chunks.chunks), *read, CHUNK=sampling.CHUNK)
    sizes = {"CHUNK": sampling.CHUNK, "CHUNKS": power_of_two(chunks.chunks), "WIDTH": MAX_LOGPROBS}
    launch(row_logprobs, (count,), *read, width, *out[1:], **sizes, num_warps=1)


@triton.jit
def _order(values, ids, vocab):
    """Return keys of logits, which ascend from best to worst, and with the id where logits are equal."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    falling = ~(bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return tl.where(ids < vocab, (falling.to(tl.int64) << 32) | ids, NO_KEY)


@triton.jit
def _asks(ints, room, tokens, i):
    return (tl.load(ints + NUM_LOGPROBS * room + i) >= 0) & (tl.load(tokens + i) >= 0)


@triton.jit
def chunk_logprobs(logits, stride, vocab, ints, room, tokens, peaks, better, sums, keys, chunks, CHUNK: tl.constexpr):
    """Find the peak, sum and best key of each chunk, and how many of its logits are above that of the token."""
    i, chunk = tl.program_id(0), tl.program_id(1)
    if _asks(ints, room, tokens, i) == 0:
        return
    ids, values = _values(logits, stride, vocab, i, chunk, CHUNK)
    peak, at = tl.max(values, 0), i * chunks + chunk
    own = tl.load(logits + i.to(tl.int64) * stride + tl.load(tokens + i))
    tl.store(peaks + at, peak)
    tl.store(better + at, tl.sum((values > own).to(tl.int32), 0))
    tl.store(sums + at, tl.sum(tl.exp(_scores(values, peak, 1.0)).to(tl.float64), 0))
    tl.store(keys + at, tl.min(_order(values, ids, vocab), 0))


@triton.jit(do_not_specialize=["width"])
def row_logprobs(
    logits,
    stride,
    vocab,
    ints,
    room,
    tokens,
    peaks,
    better,
    sums,
    keys,
    chunks,
    width,
    ranks,
    row_sums,
    row_peaks,
    values,
    best_ids,
    best_values,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Join the chunks of a row, and take out the best tokens one by one."""
    i, chunk = tl.program_id(0), tl.arange(0, CHUNKS)
    if _asks(ints, room, tokens, i) == 0:
        return
    live, row = chunk < chunks, logits + i.to(tl.int64) * stride
    found, peak, _ = _row_peak(peaks, i, chunks, CHUNKS)
    shares = tl.load(sums + i * chunks + chunk, mask=live, other=0.0)
    shares *= tl.exp(_scores(found, peak, 1.0)).to(tl.float64)
    tl.store(row_sums + i, tl.sum(shares, 0))
    tl.store(row_peaks + i, peak)
    tl.store(values + i, tl.load(row + tl.load(tokens + i)))
    tl.store(ranks + i, tl.sum(tl.load(better + i * chunks + chunk, mask=live, other=0), 0) + 1)
    firsts = tl.load(keys + i * chunks + chunk, mask=live, other=NO_KEY)
    for place in range(width):
        key = tl.min(firsts, 0)
        token = (key & 0xFFFFFFFF).to(tl.int32)
        tl.store(best_ids + i * WIDTH + place, token)
        tl.store(best_values + i * WIDTH + place, tl.load(row + token))
        ids, others = _values(logits, stride, vocab, i, token // CHUNK, CHUNK)
        order = _order(others, ids, vocab)
        firsts = tl.where(chunk == token // CHUNK, tl.min(tl.where(order > key, order, NO_KEY), 0), firsts)
