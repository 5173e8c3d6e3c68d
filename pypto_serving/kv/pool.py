"""BlockPool: owner of the blocks of one KV group in one tier."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from pypto_serving.kv.events import EventLog
from pypto_serving.types.tier import Tier

NULL_BLOCK = 0


class BlockPool:
    """Owns the blocks of one group in one tier: their references, contents, and order in the queue of free blocks.

    - A block with a key holds published content, and can be found even while it is free.
    - A kept block is stored in lower tiers once it is free.
    - Order of use: free blocks without content, `_empty`, from the end; then new blocks; then the queue `_free`, least
      recently used first.
    - Block 0 is the null block. It is never handed out.
    - `num_free` of its `num_blocks` can be handed out.
    - `released`: kept blocks in the order in which they became free; a reader removes them.
    - `events` receives published and forgotten keys, as those of group `g` in `tier`.
    - A new block never held published content. It is created when first handed out, so the memory of a pool grows with
      its use.
    """

    def __init__(self, num_blocks: int, events: EventLog | None = None, tier: Tier = "device", g: int = 0) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool of {num_blocks} blocks has none to hand out; it needs at least 2")
        self.num_blocks = self.num_free = num_blocks - 1
        self._references = [0]
        self._keys: list[bytes | None] = [None]
        self._used = bytearray(1)
        self._kept: set[int] = set()
        self._by_key: dict[bytes, int] = {}
        self._empty: list[int] = []
        self._free: OrderedDict[int, None] = OrderedDict()
        self._used_before_new = 0
        self.released: OrderedDict[int, None] = OrderedDict()
        self.num_evicted = 0
        self._events, self._tier, self._g = events, tier, g

    @property
    def _num_unmade(self) -> int:
        return self.num_blocks + 1 - len(self._references)

    @property
    def num_published(self) -> int:
        """Number of blocks whose content can be found, in use or free."""
        return len(self._by_key)

    def find(self, key: bytes) -> int | None:
        """Return the id of the block that holds `key`. Does not change the pool."""
        return self._by_key.get(key)

    def is_free(self, block_id: int) -> bool:
        """Return whether a block has no references."""
        return block_id >= len(self._references) or not (self._references[block_id] or block_id == NULL_BLOCK)

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each of these blocks, which are published or in use."""
        references = self._references
        for block_id in block_ids:
            if references[block_id] == 0:
                del self._free[block_id]
                self.num_free -= 1
                self.released.pop(block_id, None)
            references[block_id] += 1

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks without content, with one reference each; evict published ones if necessary.

        Raises RuntimeError if fewer are free; callers must check `num_free` first.
        """
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks asked for, {self.num_free} are free")
        self.num_free -= count
        empty, references = self._empty, self._references
        left = max(0, len(empty) - count)
        block_ids = empty[left:]
        block_ids.reverse()
        del empty[left:]
        for block_id in block_ids:
            references[block_id] = 1
        if self._used_before_new:
            self._used_before_new = max(0, self._used_before_new - len(block_ids))
        while len(block_ids) < count:
            if not self._free or (self._num_unmade and not self._used_before_new):
                block_ids += self._make(min(count - len(block_ids), self._num_unmade))
            else:
                block_ids.append(self._evict())
        return block_ids

    def _evict(self) -> int:
        """Take the first block of the queue of free blocks, and forget its content."""
        block_id, _ = self._free.popitem(last=False)
        self._used_before_new = max(0, self._used_before_new - 1)
        if self._keys[block_id] is not None:
            self.num_evicted += 1
            self._forget(block_id)
        self._references[block_id] = 1
        return block_id

    def _make(self, count: int, references: int = 1) -> range:
        """Create `count` new blocks with `references` each."""
        first = len(self._references)
        self._references += [references] * count
        self._keys += [None] * count
        self._used += bytes(count)
        return range(first, first + count)

    def free(self, block_ids: Sequence[int]) -> None:
        """Remove one reference from each block; the first of `block_ids` is evicted last."""
        references, keys, empty, free = self._references, self._keys, self._empty, self._free
        before = len(empty) + len(free)
        for block_id in reversed(block_ids):
            count = references[block_id]
            references[block_id] = count - 1
            if count == 1:
                if keys[block_id] is None:
                    empty.append(block_id)
                else:
                    free[block_id] = None
                    if block_id in self._kept:
                        self.released[block_id] = None
            elif count < 1:
                raise RuntimeError(f"block {block_id} is freed twice")
        self.num_free += len(empty) + len(free) - before

    def publish(self, block_id: int, key: bytes) -> None:
        """Make a complete block findable by `key`, unless it has a key already or another block has this key."""
        if self._keys[block_id] is not None or key in self._by_key:
            return
        self._keys[block_id], self._used[block_id] = key, True
        self._by_key[key] = block_id
        if self._events is not None:
            self._events.held(self._tier, self._g, key)

    def is_new(self, block_id: int) -> bool:
        """Return whether a block never held published content, or has lost its storage."""
        return not self._used[block_id]

    def make_new(self, block_id: int) -> None:
        """Record that the storage of a block is lost or never existed."""
        self._used[block_id] = False

    def keep(self, block_id: int) -> None:
        """Mark a published block to be stored in lower tiers as soon as it is free."""
        if self._keys[block_id] is not None and block_id not in self._kept:
            self._kept.add(block_id)
            if self._references[block_id] == 0:
                self.released[block_id] = None

    def num_references(self, block_id: int) -> int:
        """Return the number of references to a block."""
        return self._references[block_id]

    def key(self, block_id: int) -> bytes | None:
        """Return the key of a published block, or None for others."""
        return self._keys[block_id]

    def touch(self, block_id: int, last: bool = True) -> None:
        """Move a block to the end of the queue or, with `last` false, to its front."""
        if block_id in self._free:
            self._free.move_to_end(block_id, last=last)

    def use_new_last(self) -> None:
        """Move new blocks to the end of the queue, and create further ones only last: their storage may lack room."""
        for block_id in reversed(self._empty):
            if not self._used[block_id]:
                self._free[block_id] = None
        self._empty = [block_id for block_id in self._empty if self._used[block_id]]
        self._used_before_new = len(self._empty) + len(self._free)

    def fill(self, block_ids: Sequence[int], keys: Sequence[bytes]) -> None:
        """Publish `keys` in free blocks without content; the first key is evicted first."""
        last = min(max(block_ids, default=0), self.num_blocks)
        self._empty += self._make(max(0, last + 1 - len(self._references)), references=0)
        for block_id, key in zip(block_ids, keys, strict=True):
            if self.is_free(block_id) and self._keys[block_id] is None and key not in self._by_key:
                self.publish(block_id, key)
                self._free[block_id] = None
        self._empty = [block_id for block_id in self._empty if self._keys[block_id] is None]

    def drop(self, block_id: int) -> None:
        """Forget the content of a block, which is damaged or cleared. A free block is used next."""
        self._forget(block_id)
        if block_id in self._free:
            del self._free[block_id]
            self._empty.append(block_id)

    def drop_all(self) -> None:
        """Forget the content of all blocks, including those in use."""
        for block_id in list(self._by_key.values()):
            self.drop(block_id)

    def _forget(self, block_id: int) -> None:
        key = self._keys[block_id]
        if key is not None:
            del self._by_key[key]
            if self._events is not None:
                self._events.gone(self._tier, self._g, key)
            self._keys[block_id] = None
            self._kept.discard(block_id)
            self.released.pop(block_id, None)

    def check(self, references: dict[int, int]) -> None:
        """Assert that reference counts equal `references`, and that each block is either free or in use."""
        assert self.num_free == len(self._free) + len(self._empty) + self._num_unmade
        free = {*self._free, *self._empty}
        for block_id, (count, key) in enumerate(zip(self._references, self._keys, strict=True)):
            assert count == references.get(block_id, 0), (
                f"block {block_id} has {count} references, its users hold {references.get(block_id, 0)}"
            )
            in_queue = block_id in free
            assert in_queue == (count == 0 and block_id != NULL_BLOCK), f"block {block_id} free={in_queue}"
            if key is not None:
                assert self._by_key.get(key) == block_id, f"the key of block {block_id} finds another block"
        assert all(self._keys[b] == key for key, b in self._by_key.items())
        assert all(self._keys[b] for b in self._kept)
        assert all(b in self._free and b in self._kept for b in self.released)
        assert NULL_BLOCK not in references
