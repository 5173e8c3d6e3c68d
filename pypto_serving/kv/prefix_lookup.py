"""Prefix lookup: count the cached tokens of a sequence, on the device or including lower tiers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from pypto_serving.kv.block_table import SequenceState
from pypto_serving.kv.group import Find, KVGroup
from pypto_serving.kv.lower_tier import LowerTier, fastest

FindIn = Callable[[KVGroup], Find]


def on_device_or_in(tiers: Sequence[LowerTier]) -> FindIn:
    """Return a function that finds blocks on the device or in one of `tiers`."""

    def find_in(group: KVGroup) -> Find:
        find_on_device = group.pool.find

        def find(key: bytes) -> object | None:
            block = find_on_device(key)
            return fastest(tiers, group, key) if block is None else block

        return find

    return find_in


def longest_prefix(sequence: SequenceState, limit: int, find_in: FindIn) -> int:
    """Return the largest n <= `limit` that every group accepts: groups shrink the candidate until all accept it.

    A full-history group accepts every resume point before the one that it returned, so it is asked only once.
    """
    candidate, agreed = limit, -1
    for table in sequence.histories:
        candidate = table.group.accepted(table.keys, candidate, find_in(table.group))
    while candidate and candidate != agreed:
        agreed = candidate
        for table in sequence.recent:
            candidate = table.group.accepted(table.keys, candidate, find_in(table.group))
    return candidate


def shared_prefix(one: SequenceState, other: SequenceState, limit: int) -> int:
    """Return the last resume point <= `limit` up to which the keys of two sequences are known and equal."""
    step = one.points.step

    def differ(position: int) -> bool:
        key = one.chain.until(position)
        return key is None or key != other.chain.until(position)

    return bisect_left(range(step, limit + 1, step), True, key=differ) * step
