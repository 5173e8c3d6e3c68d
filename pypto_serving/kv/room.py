"""Decide whether the block tables of a sequence can grow, in all groups at once, and grow them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pypto_serving.kv.pool import NULL_BLOCK
from pypto_serving.kv.sequence import SequenceState

BlockIds = Sequence[list[int]]
"""Block ids per group, in order of position."""
NOTHING: BlockIds = ()


def grow(sequence: SequenceState, num_tokens: int) -> BlockIds | None:
    """Append fresh blocks until `num_tokens` tokens fit. Return them, or append none if a pool lacks some: None.

    Blocks of windows and states that are not needed any more are freed before: while a sequence decodes, here alone.
    """
    settled = sequence.computed - sequence.points.lag
    if sequence.recent and settled > sequence.committed:
        sequence.free_passed(settled)
    growing = [(part, part.missing(num_tokens)) for part in sequence.parts if part.capacity < num_tokens]
    for part, count in growing:
        if count > part.group.pool.num_free:
            return None
    added: list[list[int]] = [[]] * len(sequence.parts)
    for part, count in growing:
        added[part.group.index] = part.grow(count)
    sequence.set_capacity()
    return added


def start(sequence: SequenceState, num_tokens: int, matched: int) -> BlockIds | None:
    """Do what `grow` does for a sequence without blocks whose first `matched` tokens are cached. Return its table."""
    cached = [part.cached(matched) for part in sequence.parts]
    for part, blocks in zip(sequence.parts, cached, strict=True):
        pool = part.group.pool
        missing = part.group.missing(len(blocks) * part.group.block_size, num_tokens)
        if missing + sum(map(pool.is_free, blocks)) > pool.num_free:
            return None
    for part, blocks in zip(sequence.parts, cached, strict=True):
        part.start(blocks)
        part.grow(part.missing(num_tokens))
    sequence.computed = sequence.committed = matched
    sequence.set_capacity()
    return sequence.tables()


def fits(
    sequence: SequenceState, matched: int, num_tokens: int, step_tokens: int, spare: float, reserved: Iterable[int]
) -> bool:
    """Return whether a sequence with `matched` cached tokens may grow to `num_tokens` with the blocks free now.

    Of its tokens `step_tokens` are computed and not settled. `reserved` blocks of each group, and the share `spare` of
    each pool, are for others.
    """
    for part, kept in zip(sequence.parts, reserved, strict=True):
        pool = part.group.pool
        cached = part.cached(matched)
        in_use = sum(1 for block_id in cached if block_id != NULL_BLOCK and not pool.is_free(block_id))
        in_use += len(part.table) - part.first
        needed = part.group.live_blocks(num_tokens, step_tokens) - in_use
        if needed + kept + int(pool.num_blocks * spare) > pool.num_free:
            return False
    return True


def will_fit(sequence: SequenceState, num_tokens: int, coming_free: Sequence[int]) -> bool:
    """Return whether a sequence can grow to `num_tokens` once `coming_free` more blocks of each group are free."""
    return all(
        part.missing(num_tokens) <= part.group.pool.num_free + coming
        for part, coming in zip(sequence.parts, coming_free, strict=True)
    )
