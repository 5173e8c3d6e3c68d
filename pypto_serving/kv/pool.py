"""BlockPool: owner of the blocks of one KV group in one tier."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from pypto_serving.kv.events import PoolEvents

NULL_BLOCK = 0


class Block:
    """One allocation unit. A block with a key holds published content and stays findable while it is free.

    A `kept` block is stored in lower tiers once nobody refers to it. A `new` block never held published content.
    """

    __slots__ = ("kept", "key", "new", "ref_count")

    def __init__(self) -> None:
        self.ref_count = 0
        self.key: bytes | None = None
        self.kept = False
        self.new = True


class BlockPool:
    """Owns every Block of one group: its references, its content, and its place in the queue of free blocks.

    - The queue is evicted from its front: blocks without content come first, then published ones, the least recently
      used first.
    - Block 0 is the null block. It is never handed out.
    - `released` are the kept blocks that came free, the first one first, until a reader removes them from there.
    - `events` is told which keys are published and forgotten.
    - A Block is made when it is handed out for the first time, so a pool costs what it has held.
    """

    def __init__(self, num_blocks: int, events: PoolEvents | None = None) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool of {num_blocks} blocks has none to hand out; it needs at least 2")
        self.num_blocks = num_blocks - 1
        self._blocks = [Block()]
        self._by_key: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict()
        self._used_before_new = 0
        self.released: OrderedDict[int, None] = OrderedDict()
        self.num_evicted = 0
        self._events = events

    @property
    def _num_unmade(self) -> int:
        return self.num_blocks + 1 - len(self._blocks)

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out."""
        return len(self._free) + self._num_unmade

    @property
    def num_published(self) -> int:
        """Blocks whose content can be found, in use or not."""
        return len(self._by_key)

    def find(self, key: bytes) -> int | None:
        """Return the id of the block that holds `key`. Does not change the pool."""
        return self._by_key.get(key)

    def is_free(self, block_id: int) -> bool:
        """Return whether nobody refers to a block."""
        return block_id in self._free or block_id >= len(self._blocks)

    def share(self, block_ids: Iterable[int]) -> None:
        """Take one more reference to blocks that are published or in use."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.ref_count == 0:
                del self._free[block_id]
                self.released.pop(block_id, None)
            block.ref_count += 1

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks without content, with one reference each; published ones are evicted if need be.

        Raises RuntimeError when fewer are free: callers ask `num_free` first.
        """
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks asked for, {self.num_free} are free")
        block_ids = [self._take() for _ in range(count)]
        for block_id in block_ids:
            self.num_evicted += self._blocks[block_id].key is not None
            self._forget(block_id)
            self._blocks[block_id].ref_count = 1
        return block_ids

    def _take(self) -> int:
        """Remove the next block to use from the free ones.

        1. The queue is empty: a block that was never made.
        2. The front of the queue holds content, and blocks that were never made may be used: one of those.
        3. Otherwise the front of the queue.
        """
        front = next(iter(self._free), None)
        if front is None:
            return self._make()
        if self._blocks[front].key is not None and self._num_unmade and not self._used_before_new:
            return self._make()
        self._used_before_new = max(0, self._used_before_new - 1)
        return self._free.popitem(last=False)[0]

    def _make(self) -> int:
        self._blocks.append(Block())
        return len(self._blocks) - 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop one reference to each block; the first of `block_ids` is evicted last."""
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            if block.ref_count < 1:
                raise RuntimeError(f"block {block_id} is freed twice")
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free[block_id] = None
                if block.key is None:
                    self._free.move_to_end(block_id, last=False)
                elif block.kept:
                    self.released[block_id] = None

    def publish(self, block_id: int, key: bytes) -> None:
        """Make a complete block findable by `key`, unless it has a key or another block holds this one."""
        block = self._blocks[block_id]
        if block.key is not None or key in self._by_key:
            return
        block.key, block.new = key, False
        self._by_key[key] = block_id
        if self._events is not None:
            self._events.held(key)

    def keep(self, block_id: int) -> None:
        """Have a published block stored in lower tiers as soon as it is free."""
        block = self._blocks[block_id]
        if block.key is not None and not block.kept:
            block.kept = True
            if block.ref_count == 0:
                self.released[block_id] = None

    def num_references(self, block_id: int) -> int:
        """Return how many references a block has."""
        return self._blocks[block_id].ref_count

    def key(self, block_id: int) -> bytes | None:
        """Return the key of a published block, None for others."""
        return self._blocks[block_id].key

    def touch(self, block_id: int, last: bool = True) -> None:
        """Move a free block to the end of the queue, or, with `last` false, to its front."""
        if block_id in self._free:
            self._free.move_to_end(block_id, last=last)

    def use_new_last(self) -> None:
        """Move new blocks to the end of the queue, and make none before it: what backs them may not have room."""
        empty = itertools.takewhile(lambda block_id: self._blocks[block_id].key is None, self._free)
        for block_id in [block_id for block_id in empty if self._blocks[block_id].new]:
            self._free.move_to_end(block_id)
        self._used_before_new = len(self._free)

    def fill(self, block_ids: Sequence[int], keys: Sequence[bytes]) -> None:
        """Publish `keys` in free blocks without content; the first key is evicted first."""
        for block_id in range(len(self._blocks), min(max(block_ids, default=0), self.num_blocks) + 1):
            self._blocks.append(Block())
            self._free[block_id] = None
            self._free.move_to_end(block_id, last=False)
        for block_id, key in zip(block_ids, keys, strict=True):
            if block_id in self._free and self._blocks[block_id].key is None and key not in self._by_key:
                self.publish(block_id, key)
                self._free.move_to_end(block_id)

    def drop(self, block_id: int) -> None:
        """Forget the content of a block, which is damaged or cleared. A free one goes to the front of the queue."""
        self._forget(block_id)
        if block_id in self._free:
            self._free.move_to_end(block_id, last=False)

    def drop_all(self) -> None:
        """Forget the content of all blocks, those in use too."""
        for block_id in list(self._by_key.values()):
            self.drop(block_id)

    def _forget(self, block_id: int) -> None:
        block = self._blocks[block_id]
        if block.key is not None:
            del self._by_key[block.key]
            if self._events is not None:
                self._events.gone(block.key)
            block.key = None
            block.kept = False
            self.released.pop(block_id, None)

    def check(self, references: dict[int, int]) -> None:
        """Assert that reference counts equal `references`, and that free + in use is everything."""
        for block_id, block in enumerate(self._blocks):
            assert block.ref_count == references.get(block_id, 0), (
                f"block {block_id} has {block.ref_count} references, its users hold {references.get(block_id, 0)}"
            )
            in_queue = block_id in self._free
            assert in_queue == (block.ref_count == 0 and block_id != NULL_BLOCK), f"block {block_id} free={in_queue}"
            if block.key is not None:
                assert self._by_key.get(block.key) == block_id, f"the key of block {block_id} finds another block"
        assert all(self._blocks[b].key == key for key, b in self._by_key.items())
        assert all(b in self._free and self._blocks[b].kept and self._blocks[b].key for b in self.released)
        assert NULL_BLOCK not in references
