"""BlockPool: who holds a block, what it remembers, which one goes next."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from pypto_serving.kv.pool import BlockPool
from tests.thinning import examples


def test_null_block_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]


def test_allocate_beyond_free_raises() -> None:
    with pytest.raises(RuntimeError, match="5 blocks asked for, 4 are free"):
        BlockPool(5).allocate(5)


def test_double_free_raises() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.free(blocks)


def test_least_recently_freed_is_evicted_first_and_blocks_without_content_before() -> None:
    pool = BlockPool(6)
    old, new, plain = pool.allocate(1), pool.allocate(1), pool.allocate(1)
    pool.publish(old[0], b"old")
    pool.publish(new[0], b"new")
    for blocks in (old, new, plain):
        pool.free(blocks)
    taken = pool.allocate(3)
    assert set(taken).isdisjoint(old + new), "blocks without content go first"
    assert pool.allocate(1) == old
    assert pool.find(b"old") is None
    assert pool.find(b"new") == new[0]


def test_front_of_a_freed_sequence_is_evicted_last() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    for i, block in enumerate(blocks):
        pool.publish(block, bytes([i]))
    pool.free(blocks)
    assert pool.allocate(2) == [blocks[2], blocks[1]]


def test_entry_taken_over_by_another_block_survives_eviction_of_the_first_holder() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(1), pool.allocate(1)
    pool.publish(first[0], b"key")
    pool.publish(second[0], b"key")
    assert pool.find(b"key") == first[0]
    pool.free(first)
    pool.allocate(2)
    assert pool.find(b"key") is None
    pool.publish(second[0], b"key")
    pool.free(pool_blocks := second)
    assert pool.find(b"key") == pool_blocks[0]
    pool.check({1: 1, 3: 1})


def test_blocks_that_never_held_content_can_go_last() -> None:
    pool = BlockPool(6)
    first, second, failed = pool.allocate(1), pool.allocate(1), pool.allocate(1)
    pool.publish(first[0], b"first")
    pool.publish(second[0], b"second")
    for blocks in (first, second, failed):
        pool.free(blocks)
    pool.use_new_last()
    assert pool.allocate(1) == first
    pool.free(first)
    pool.use_new_last()
    assert pool.allocate(1) == first, "it held content before"
    assert pool.allocate(1) == second
    assert set(pool.allocate(3)).isdisjoint(first + second)


class PoolMachine(RuleBasedStateMachine):
    """Random use by well-behaved callers."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.references: Counter[int] = Counter()

    @rule(target=held, count=st.integers(0, 4))
    def allocate(self, count: int) -> list[int]:
        if count > self.pool.num_free:
            return []
        blocks = self.pool.allocate(count)
        self.references.update(blocks)
        return blocks

    @rule(blocks=held, key=st.integers(0, 12))
    def publish(self, blocks: list[int], key: int) -> None:
        if blocks and self.references[blocks[0]]:
            self.pool.publish(blocks[0], bytes([key]))

    @rule(target=held, key=st.integers(0, 12))
    def share(self, key: int) -> list[int]:
        block = self.pool.find(bytes([key]))
        if block is None:
            return []
        self.pool.share([block])
        self.references[block] += 1
        return [block]

    @rule(blocks=consumes(held))
    def free(self, blocks: list[int]) -> None:
        self.pool.free(blocks)
        self.references.subtract(blocks)

    @rule()
    def use_new_last(self) -> None:
        self.pool.use_new_last()

    @invariant()
    def consistent(self) -> None:
        self.pool.check(+self.references)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = examples(60, stateful_step_count=40)
