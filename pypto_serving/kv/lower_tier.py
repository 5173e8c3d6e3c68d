"""LowerTier: the core's view of one tier below the device; ActiveTransfers: all transfers between tiers."""

from __future__ import annotations

import enum
import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from pypto_serving.kv.events import EventLog
from pypto_serving.kv.group import GroupKey, KVGroup
from pypto_serving.kv.pool import BlockPool
from pypto_serving.types.arrays import pack_ids, unpack_ids
from pypto_serving.types.request import TierStats
from pypto_serving.types.tier import KEY_BYTES, TierConfig, TierInventory, TransferDone, TransferJob, TransferKind
from pypto_serving.util import Backoff, Rate

MAX_DISCARDED = 1 << 16
"""Limit of remembered discarded blocks of a shared tier; the oldest are forgotten first."""


class TierCounters(msgspec.Struct):
    """Totals since the start; see TierStats."""

    hit_tokens: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    stored_blocks: int = 0
    stored_bytes: int = 0
    store_s: float = 0.0
    failed_blocks: int = 0
    lost_blocks: int = 0
    refused_fills: int = 0
    saved_s: float = 0.0

    def loaded(self, done: TransferDone, num_bytes: int) -> None:
        """Count the pieces of a load that moved `num_bytes`."""
        self.loaded_blocks += sum(done.done)
        self.failed_blocks += len(done.done) - sum(done.done)
        self.loaded_bytes += num_bytes
        self.load_s += done.elapsed_s

    def stored(self, done: TransferDone, num_bytes: int) -> None:
        """Count the pieces of a store that moved `num_bytes`."""
        self.stored_blocks += sum(done.done)
        self.failed_blocks += len(done.done) - sum(done.done)
        self.stored_bytes += num_bytes
        self.store_s += done.elapsed_s


class LowerTier:
    """The pools of one tier, one per group, the blocks waiting to be stored there, and its speed.

    Changed only by the TierManager and its parts. Slot i of a group is block i + 1 of its pool.

    - `backlog`: blocks to store, the next one first. `storing`: blocks being stored.
    - `backoff`: pause after stores of which no block succeeded.
    - `spent_s`, `spared_tokens`: time of loads and the tokens that they spared, not yet counted in `saved_s`.
    - `discarded`: blocks that a shared store may hold but that must not be loaded or stored, oldest first.
    - `lacking`: groups in which a block could not be stored, and none was stored in a new slot since.
    - `stuck`: a transfer is overdue, or the tier is `left_out` of this life of the worker. No transfer begins.
    - `clearing`: its store has not forgotten all blocks yet.
    """

    def __init__(self, config: TierConfig, groups: Sequence[KVGroup], events: EventLog | None = None) -> None:
        self.config = config
        self._events = events
        self._groups = groups
        self.load_rate = Rate()
        self.counters = TierCounters()
        self.spared_tokens = self.spent_s = 0.0
        self.backlog: OrderedDict[GroupKey, None] = OrderedDict()
        self.storing: set[GroupKey] = set()
        self.discarded: OrderedDict[GroupKey, None] = OrderedDict()
        self.backoff = Backoff()
        self.stuck = self.clearing = self.left_out = False
        self.pools: dict[KVGroup, BlockPool] = {}
        self._num_evicted = 0
        self.lacking: set[KVGroup] = set()
        self.forget_all()

    def forget_all(self) -> None:
        """Reset to an empty, writable tier without transfers."""
        self._num_evicted += sum(pool.num_evicted for pool in self.pools.values())
        tier, events = self.config.tier, self._events
        if events is not None:
            events.cleared(tier)
        self.pools = {
            group: BlockPool(max(1, slots) + 1, events, tier, group.index)
            for group, slots in zip(self._groups, self.config.num_slots, strict=True)
        }
        self.writable, self.shared = True, False
        self.backlog.clear()
        self.lacking.clear()
        self.stop_transfers()

    def stop_transfers(self) -> None:
        """Forget all transfers."""
        self.stuck = self.left_out = False
        self.storing.clear()

    def open(self, inventory: TierInventory) -> None:
        """Take over the inventory of a store."""
        self.forget_all()
        self.stuck = self.left_out = inventory.left_out
        self.writable, self.shared = inventory.writable, inventory.shared
        groups, slots = unpack_ids(inventory.groups), unpack_ids(inventory.slots) + 1
        keys = inventory.keys
        for group, pool in self.pools.items():
            mine = (groups == group.index).nonzero()[0]
            held = [keys[i : i + KEY_BYTES] for i in (mine * KEY_BYTES).tolist()]
            pool.fill(slots[mine].tolist(), held)

    def find(self, group: KVGroup, key: bytes) -> int | None:
        """Return the block of the pool that holds `key`, or None."""
        return self.pools[group].find(key)

    def lacks(self, block: GroupKey) -> bool:
        """Return whether a block should be stored: it is not here, not being stored, and was not discarded."""
        return self.find(*block) is None and block not in self.storing and block not in self.discarded

    def learn(self, found: Iterable[GroupKey]) -> None:
        """Record blocks that other replicas have stored, as far as there are free slots to represent them."""
        for group, key in found:
            pool = self.pools[group]
            if pool.find(key) is None and pool.num_free and (group, key) not in self.discarded:
                block_ids = pool.allocate(1)
                pool.publish(block_ids[0], key)
                pool.free(block_ids)

    def discard(self, group: KVGroup, key: bytes) -> None:
        """Forget a block, and never store it. If a shared store reports it, ignore that."""
        self.backlog.pop((group, key), None)
        if self.shared:
            self.discarded[group, key] = None
            if len(self.discarded) > MAX_DISCARDED:
                self.discarded.popitem(last=False)
        tier_block = self.find(group, key)
        if tier_block is not None:
            self.pools[group].drop(tier_block)

    def put_off(self, block: GroupKey, at_most: int) -> None:
        """Queue a block to be stored. Above `at_most` blocks, drop the first, which the device has evicted."""
        self.backlog[block] = None
        if len(self.backlog) > at_most:
            self.backlog.popitem(last=False)
            self.counters.lost_blocks += 1

    def accepts(self, now_s: float) -> bool:
        """Return whether stores may begin now."""
        return self.writable and not self.stuck and self.backoff.is_over(now_s)

    def stats(self, queued_bytes: int) -> TierStats:
        """Return one snapshot; a tier that is stuck or lacks room counts as not writable."""
        return TierStats(
            tier=self.config.tier,
            writable=self.writable and not self.stuck and not self.lacking,
            num_blocks=sum(self.config.num_slots),
            held_blocks=sum(pool.num_published for pool in self.pools.values()),
            queued_bytes=queued_bytes,
            backlog_blocks=len(self.backlog),
            evicted_blocks=self._num_evicted + sum(pool.num_evicted for pool in self.pools.values()),
            **msgspec.structs.asdict(self.counters),
        )


def fastest(tiers: Iterable[LowerTier], group: KVGroup, key: bytes) -> LowerTier | None:
    """Return the first of `tiers`, fastest first, that holds a block and is not stuck."""
    for tier in tiers:
        if not tier.stuck and tier.find(group, key) is not None:
            return tier
    return None


SLOWEST_BYTES_PER_S = 50e6
"""A transfer is overdue after its time-out plus the time to move all bytes in transfer with the tier at this speed."""

MOVES: tuple[TransferKind, ...] = ("load", "store")
"""Transfers that hold references to blocks."""


class TransferState(enum.Enum):
    """PREPARING: decided. FILLING: sent to the worker. QUARANTINED: not awaited, but the worker may still write."""

    PREPARING = "preparing"
    FILLING = "filling"
    QUARANTINED = "quarantined"


class Moved(NamedTuple):
    """One block of a transfer: its id on the device, and its id in the tier's pool."""

    group: KVGroup
    block: int
    tier_block: int
    key: bytes


@dataclass(slots=True, eq=False)
class Transfer:
    """One transfer, which holds a reference to each of its blocks on both sides until it ends.

    `moved` is in order of position for a load, and in reverse for a store, so that the front of a sequence is freed,
    and evicted, last. A `void` transfer publishes nothing, since its blocks shall be forgotten. Overdue at `due_s`.
    """

    job_id: int
    kind: TransferKind
    tier: LowerTier
    moved: list[Moved]
    num_bytes: int
    fill: Fill | None
    state: TransferState = TransferState.PREPARING
    due_s: float = math.inf
    void: bool = False


@dataclass(slots=True, eq=False)
class Fill:
    """The transfers that request `request_id` began, which spare computing `num_tokens`.

    `num_transfers` have not ended yet; `ended` has the ended ones, with their durations in seconds.
    """

    request_id: str
    num_tokens: int
    num_transfers: int = 0
    failed: bool = False
    ended: list[tuple[Transfer, float]] = field(default_factory=list)


class ActiveTransfers:
    """Owns every Transfer until it ends, and the jobs not yet sent to the worker.

    A hanging transfer keeps its device blocks. So all transfers together must leave `longest_blocks` of each group
    free, enough for one sequence of the longest length. A single load may exceed this; if it is overdue after
    `timeout_s`, and nothing can run because its blocks are missing, the worker is replaced.
    """

    def __init__(self, groups: Sequence[KVGroup], longest_blocks: Sequence[int], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._longest = dict(zip(groups, longest_blocks or [0] * len(groups), strict=True))
        self._held: dict[KVGroup, Counter[int]] = {group: Counter() for group in groups}
        self._transfers: dict[int, Transfer] = {}
        self._outbox: list[TransferJob] = []
        self._num_jobs = 0

    def __len__(self) -> int:
        return len(self._transfers)

    def __iter__(self) -> Iterator[Transfer]:
        return iter(self._transfers.values())

    def begin(self, kind: TransferKind, tier: LowerTier, moved: list[Moved], fill: Fill | None = None) -> None:
        """Add a transfer, as a part of `fill` if given. It takes over one reference to each block that it moves."""
        self._num_jobs += 1
        num_bytes = 0 if kind == "find" else sum(piece.group.block_bytes for piece in moved)
        self._transfers[self._num_jobs] = Transfer(self._num_jobs, kind, tier, moved, num_bytes, fill)
        if fill is not None:
            fill.num_transfers += 1
        for piece in moved if kind in MOVES else ():
            self._held[piece.group][piece.block] += 1
        self._outbox.append(
            TransferJob(
                job_id=self._num_jobs,
                kind=kind,
                tier=tier.config.tier,
                groups=pack_ids([piece.group.index for piece in moved]),
                blocks=pack_ids([piece.block for piece in moved]),
                slots=pack_ids([piece.tier_block - 1 for piece in moved]),
                keys=b"".join(piece.key for piece in moved),
            )
        )

    def take_jobs(self, now_s: float) -> list[TransferJob]:
        """Return the jobs to send to the worker now. From then on, the worker may write to their blocks."""
        jobs, self._outbox = self._outbox, []
        for job in jobs:
            transfer = self._transfers[job.job_id]
            transfer.due_s = now_s + self._timeout_s + self.num_bytes(transfer.tier) / SLOWEST_BYTES_PER_S
            if transfer.state is TransferState.PREPARING:
                transfer.state = TransferState.FILLING
        return jobs

    def end(self, job_id: int) -> Transfer:
        """Remove and return the transfer of an ended job. The caller must free its blocks."""
        transfer = self._transfers.pop(job_id)
        for group, block, _, _ in transfer.moved if transfer.kind in MOVES else ():
            held = self._held[group]
            held[block] -= 1
            if not held[block]:
                del held[block]
        return transfer

    def block_budget(self, group: KVGroup) -> int:
        """Count the device blocks that further transfers may hold."""
        return group.pool.num_blocks - self._longest[group] - len(self._held[group])

    def holds(self, group: KVGroup, block: int) -> bool:
        """Return whether a transfer holds a device block."""
        return block in self._held[group]

    def abandon(self, fill: Fill) -> None:
        """Quarantine the transfers of a fill for which no request waits any more."""
        for transfer in self:
            if transfer.fill is fill:
                transfer.state = TransferState.QUARANTINED

    def forget_all(self) -> None:
        """Drop all transfers, since the worker is gone, and free their slots in host memory, which survives it."""
        for transfer in self:
            for piece in transfer.moved if transfer.tier.config.tier == "host" else ():
                transfer.tier.pools[piece.group].free([piece.tier_block])
        self._transfers.clear()
        self._outbox.clear()
        for held in self._held.values():
            held.clear()

    def moving(self, tier: LowerTier | None = None, *kinds: TransferKind) -> list[Transfer]:
        """Return the transfers that hold references to blocks, of one tier or all; only of `kinds`, if given."""
        return [each for each in self if each.kind in (kinds or MOVES) and tier in (None, each.tier)]

    def num_bytes(self, tier: LowerTier, *kinds: TransferKind) -> int:
        """Return the bytes on their way to or from a tier; only in transfers of `kinds`, if given."""
        return sum(transfer.num_bytes for transfer in self.moving(tier, *kinds))

    def references(self, group: KVGroup) -> Counter[int]:
        """Count the references to device blocks of a group."""
        counted = Counter(piece.block for transfer in self.moving() for piece in transfer.moved if piece.group is group)
        assert counted == self._held[group], "transfers hold other blocks than they count"
        return counted
