"""Change a copy of logits before tokens are chosen, in the order and with the rounding of backend/numpy_adjust.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pypto_serving.kernels.cuda import sampling
from pypto_serving.kernels.cuda.launch import launch, power_of_two, run
from pypto_serving.kernels.cuda.sampling import CHANGED, MASK, POSITION, RowParameters, _values
from pypto_serving.util import ceil_div

BLOCK = 1024
"""Tokens of a history, or entries of a list, that a program reads at once."""
BIAS_IDS, BIAS_VALUES, BANNED_IDS, WORD_STARTS, WORDS, CHANGES = (tl.constexpr(i) for i in range(6))
CHANGE_INTS = tl.constexpr(11)
IN_PROMPT, IS_BANNED = tl.constexpr(1 << 30), tl.constexpr(1 << 29)
MASKED_LEAVES, ALL_LEAVE, UNBANNED_LEAVES, UNORDERED = (tl.constexpr(1 << i) for i in range(4))


class AdjustMemory(NamedTuple):
    """Memory of R rows on the device.

    scores float32 [R, vocab]: the changed logits. marks int32 [R, vocab], zero between dispatches: how often the output
    has a token, and IN_PROMPT, IS_BANNED. flags int32: for each chunk of a row, what masks and bans leave.
    table int32: places of the parts of a ChangeTable, at the indices that these have here, and the parts. masks int32
    [R, ceil(vocab / 32)].
    """

    scores: Tensor
    marks: Tensor
    flags: Tensor
    table: Tensor
    masks: Tensor

    @classmethod
    def empty(cls, rows: int, vocab: int, table_ints: int, device: torch.device) -> AdjustMemory:
        """Allocate."""

        def room(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        scores = torch.empty((rows, vocab), dtype=torch.float32, device=device)
        flags = room(rows * ceil_div(vocab, sampling.CHUNK))
        return cls(scores, room(rows, vocab), flags, room(table_ints), room(rows, ceil_div(vocab, 32)))


def adjust(
    logits: Tensor, count: int, longest: int, given: RowParameters, history: Tensor, memory: AdjustMemory
) -> Tensor:
    """Return changed logits of the first `count` rows. `longest` is the length of the longest history that counts.

    The tokens of the worker's rows are in `history` [R, max_model_len].
    """
    vocab, room = logits.shape[1], given.ints.shape[1]
    scores, chunks = memory.scores[:count], ceil_div(vocab, sampling.CHUNK)
    run(lambda: scores.copy_(logits[:count]))
    read = scores, vocab, given.ints, room, memory.table, memory.marks
    launch(mark_tokens, (count, 1 + ceil_div(longest, BLOCK)), *read, history, history.shape[1], BLOCK=BLOCK)
    rest = *read, memory.masks, memory.masks.shape[1], memory.flags, chunks
    launch(survey_scores, (count, chunks), *rest, CHUNK=sampling.CHUNK)
    sizes = {"CHUNK": sampling.CHUNK, "CHUNKS": power_of_two(chunks)}
    launch(change_scores, (count, chunks), *rest, **sizes, enable_fp_fusion=False)
    return scores


@triton.jit
def _part(table, part):
    return table + tl.load(table + part)


@triton.jit
def _change(table, row, field):
    """Return a field of a row's CHANGE, as int32."""
    return tl.load(_part(table, CHANGES) + row * CHANGE_INTS + field)


@triton.jit
def _penalty(table, row, field):
    return _change(table, row, field).to(tl.float32, bitcast=True)


@triton.jit
def mark_tokens(scores, vocab, ints, room, table, marks, history, max_len, BLOCK: tl.constexpr):
    """Add biases; mark bans, the last tokens of bad words that the output has begun, and tokens that have penalties."""
    i, block = tl.program_id(0), tl.program_id(1)
    row = tl.load(ints + CHANGED * room + i)
    if row < 0:
        return
    position = tl.load(ints + POSITION * room + i)
    scores, marks = scores + i.to(tl.int64) * vocab, marks + i.to(tl.int64) * vocab
    history += row.to(tl.int64) * max_len
    prompt_len, offsets = _change(table, row, 3), tl.arange(0, BLOCK)
    if block > 0:
        repetition = _penalty(table, row, 0)
        if (repetition == 1) & (_penalty(table, row, 1) == 0) & (_penalty(table, row, 2) == 0):
            return
        at = (block - 1) * BLOCK + offsets
        tokens = tl.load(history + at, mask=at < position, other=-1)
        known = (tokens >= 0) & (tokens < vocab)
        tl.atomic_add(marks + tokens, 1, mask=known & (at >= prompt_len), sem="relaxed")
        if repetition != 1:
            tl.atomic_or(marks + tokens, IN_PROMPT, mask=known & (at < prompt_len), sem="relaxed")
    else:
        last = _change(table, row, 6)
        for start in range(_change(table, row, 5), last, BLOCK):
            at = start + offsets
            ids = tl.load(_part(table, BIAS_IDS) + at, mask=at < last, other=-1)
            known = (ids >= 0) & (ids < vocab)
            bias = tl.load(_part(table, BIAS_VALUES) + at, mask=at < last, other=0).to(tl.float32, bitcast=True)
            tl.store(scores + ids, tl.load(scores + ids, mask=known, other=0.0) + bias, mask=known)
        last = _change(table, row, 8)
        if position < _change(table, row, 4):
            for start in range(_change(table, row, 7), last, BLOCK):
                at = start + offsets
                ids = tl.load(_part(table, BANNED_IDS) + at, mask=at < last, other=-1)
                tl.atomic_or(marks + ids, IS_BANNED, mask=(ids >= 0) & (ids < vocab), sem="relaxed")
        for word in range(_change(table, row, 9), _change(table, row, 10)):
            start = tl.load(_part(table, WORD_STARTS) + word)
            before = tl.load(_part(table, WORD_STARTS) + word + 1) - start - 1
            fits = (before == 0) | (position - prompt_len >= before)
            differ = 0
            for first in range(0, before, BLOCK):
                at = first + offsets
                live = fits & (at < before)
                own = tl.load(_part(table, WORDS) + start + at, mask=live, other=0)
                differ += tl.sum((own != tl.load(history + position - before + at, mask=live, other=0)).to(tl.int32), 0)
            end = tl.load(_part(table, WORDS) + start + before)
            is_banned = fits & (differ == 0) & (end >= 0) & (end < vocab)
            tl.atomic_or(marks + end, IS_BANNED, mask=is_banned, sem="relaxed")


@triton.jit
def _allowed(masks, words, mask, ids, vocab):
    """Return which ids a row's mask allows; all if it has none."""
    live = (mask >= 0) & (ids < vocab)
    bits = tl.load(masks + mask * words + ids // 32, mask=live, other=-1)
    return ((bits >> (ids % 32)) & 1) != 0


@triton.jit
def survey_scores(scores, vocab, ints, room, table, marks, masks, words, flags, chunks, CHUNK: tl.constexpr):
    """Find out what each chunk has left after the mask, after mask and bans, and after bans alone."""
    i, chunk = tl.program_id(0), tl.program_id(1)
    mask = tl.load(ints + MASK * room + i)
    if (tl.load(ints + CHANGED * room + i) < 0) & (mask < 0):
        return
    ids, values = _values(scores, vocab, vocab, i, chunk, CHUNK)
    free = (tl.load(marks + i.to(tl.int64) * vocab + ids, mask=ids < vocab, other=0) & IS_BANNED) == 0
    allowed, possible = _allowed(masks, words, mask, ids, vocab), values > float("-inf")
    found = tl.max(tl.where(possible & allowed, MASKED_LEAVES, 0), 0)
    found |= tl.max(tl.where(possible & allowed & free, ALL_LEAVE, 0), 0)
    found |= tl.max(tl.where(possible & free, UNBANNED_LEAVES, 0), 0)
    found |= tl.max(tl.where((values != values) | (values == float("inf")), UNORDERED, 0), 0)
    tl.store(flags + i * chunks + chunk, found)


@triton.jit
def change_scores(
    scores,
    vocab,
    ints,
    room,
    table,
    marks,
    masks,
    words,
    flags,
    chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Apply penalties, then the mask unless it leaves no token, then bans unless they leave none. Clear the marks.

    Rows whose logits are not finite become NaN, so that no mask hides it.
    """
    i, chunk, every = tl.program_id(0), tl.program_id(1), tl.arange(0, CHUNKS)
    row, mask = tl.load(ints + CHANGED * room + i), tl.load(ints + MASK * room + i)
    if (row < 0) & (mask < 0):
        return
    found = tl.load(flags + i * chunks + every, mask=every < chunks, other=0)
    ids, values = _values(scores, vocab, vocab, i, chunk, CHUNK)
    at, live = marks + i.to(tl.int64) * vocab + ids, ids < vocab
    marked = tl.load(at, mask=live, other=0)
    if row >= 0:
        repetition, frequency, presence = _penalty(table, row, 0), _penalty(table, row, 1), _penalty(table, row, 2)
        if repetition != 1:
            changed = tl.where(values > 0, tl.div_rn(values, repetition), values * repetition)
            values = tl.where((marked & ~IS_BANNED) != 0, changed, values)
        count = marked & (IS_BANNED - 1)
        values = tl.where(count > 0, values - frequency * count.to(tl.float32) - presence, values)
        tl.store(at, 0, mask=live & (marked != 0))
    masked = tl.max(found & MASKED_LEAVES, 0) != 0
    banned = tl.max(found & tl.where(masked, ALL_LEAVE, UNBANNED_LEAVES), 0) != 0
    hidden = masked & (_allowed(masks, words, mask, ids, vocab) == 0)
    hidden |= banned & ((marked & IS_BANNED) != 0)
    values = tl.where(hidden, float("-inf"), values)
    values = tl.where(tl.max(found & UNORDERED, 0) != 0, float("nan"), values)
    tl.store(scores + i.to(tl.int64) * vocab + ids, values, mask=live)
