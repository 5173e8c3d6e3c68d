"""TierManager: owner of Leases; decides which blocks go down, come back, and are forgotten below the device."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence

from pypto_serving.kv.events import EventLog
from pypto_serving.kv.lease import Fill, Lease, LeaseState, Moved, Wanted
from pypto_serving.kv.lower import GroupKey, LowerTier
from pypto_serving.kv.pool import NULL_BLOCK, BlockPool
from pypto_serving.kv.rate import Rate
from pypto_serving.types.kv import KVCacheGroupSpec
from pypto_serving.types.tier import (
    TIERS,
    StorePolicy,
    Tier,
    TierConfig,
    TierInventory,
    TransferDone,
    TransferJob,
    TransferKind,
)
from pypto_serving.types.tokens import pack_ids

MAX_STORES = 2
"""Jobs that store in one tier at once."""
MAX_STORE_BYTES = 32 << 20
"""Bytes of one of them, if it is of several blocks."""
MAX_DEMOTING_BYTES = 256 << 20
"""Bytes on their way to one tier up to which blocks of preempted requests are stored at once."""
CHECKED_BLOCKS = 1 << 16
"""Blocks of a pool that are looked through for leaks: more take longer than a request should wait."""

MAX_PINNED = 0.25
"""Share of the free device blocks that stores begun together keep from being used."""
PATIENCE_S, SLOWEST_BYTES_PER_S = 10.0, 50e6
"""A transfer may take so long beside what the slowest usable tier takes for it and what is on its way before it."""
EVICTION_MARGIN = 0.1
"""With policy `eviction`: share of a device pool, next to be evicted, that is stored."""


class TierManager:
    """Owns the tiers below the device, the Leases on their way, and the fills that requests wait for.

    Works on the device's pools, which the KVCacheManager owns: it refers to blocks while they are moved, and publishes
    them when they are filled. Takes no clock: times and speeds come as arguments.
    """

    def __init__(
        self,
        groups: tuple[KVCacheGroupSpec, ...],
        configs: Iterable[TierConfig],
        policy: StorePolicy = "through",
        events: EventLog | None = None,
    ) -> None:
        self.groups = groups
        self.policy = policy
        self.tiers = [LowerTier(config, groups, events) for config in configs]
        self.tiers.sort(key=lambda tier: TIERS.index(tier.config.tier))
        self.prefill_rate = Rate()
        self._device: list[BlockPool] = []
        self._leases: dict[int, Lease] = {}
        self._fills: dict[str, Fill] = {}
        self._filling: dict[GroupKey, Fill] = {}
        self._outbox: list[TransferJob] = []
        self._num_jobs = 0
        self._pins: list[Counter[int]] = [Counter() for _ in groups]
        self._coming_free: list[int] | None = None

    def open(self, device: list[BlockPool], inventories: Sequence[TierInventory] = ()) -> None:
        """A new worker life with empty device pools. Host memory still holds what it held, but for what was moving."""
        self._device = device
        for lease in self._leases.values():
            for moved in lease.moved if lease.tier.config.tier == "host" else ():
                lease.tier.pools[moved.group].free([moved.place])
        self._leases.clear()
        self._fills.clear()
        self._filling.clear()
        self._outbox.clear()
        self._pins = [Counter() for _ in self.groups]
        self._coming_free = None
        held = {inventory.tier: inventory for inventory in inventories}
        for tier in self.tiers:
            tier.stop_transfers()
            if tier.config.tier in held:
                tier.open(held[tier.config.tier])
            if tier.clearing:
                self._clear(tier)

    # What is where.

    def find(self, g: int, key: bytes, depth: int) -> LowerTier | None:
        """The fastest of the first `depth` tiers that holds a block and answers."""
        for tier in self.tiers[:depth]:
            if not tier.stuck and tier.find(g, key) is not None:
                return tier
        return None

    def worth(self, num_tokens: int, tier_bytes: Counter[Tier]) -> bool:
        """Whether loading `tier_bytes`, after what is on its way, is expected to be faster than computing `num_tokens`.

        What is on its way is bounded by the device blocks that it fills.
        """
        load_s = 0.0
        for tier in self.tiers:
            num_bytes = tier_bytes[tier.config.tier]
            if num_bytes:
                load_s = max(load_s, tier.load_rate.seconds(num_bytes + tier.loading_bytes))
        if load_s < self.prefill_rate.seconds(num_tokens) or not self.prefill_rate.measured:
            return True
        for tier in self.tiers:
            if tier_bytes[tier.config.tier]:
                tier.load_rate.refuse()
                tier.counters.refused_fills += 1
        return False

    def computed(self, num_tokens: int, elapsed_s: float) -> None:
        """So many prompt tokens took so long."""
        self.prefill_rate.add(num_tokens, elapsed_s)
        self._count_saved()

    # Up.

    def joins(self, request_id: str, wanted: Iterable[GroupKey]) -> bool:
        """Whether another fill brings one of these blocks; then `request_id` is named when it ends."""
        fills = (fill for pair in wanted if (fill := self._filling.get(pair)) is not None)
        fill = next((fill for fill in fills if self._fills.get(fill.request_id) is fill), None)
        if fill is not None:
            fill.waiters.append(request_id)
        return fill is not None

    def load(self, request_id: str, wanted: Sequence[Wanted], num_tokens: int) -> dict[GroupKey, Tier]:
        """Fill device blocks, to which the caller refers, each from the fastest tier that has it. Returns which has."""
        fill = self._fills[request_id] = Fill(request_id, num_tokens)
        parts: dict[Tier, list[Moved]] = {}
        for g, block, key in wanted:
            tier = self.find(g, key, len(self.tiers))
            assert tier is not None, "a block that no tier holds cannot be loaded"
            place = tier.find(g, key)
            assert place is not None
            parts.setdefault(tier.config.tier, []).append(Moved(g, block, place, key))
            self._filling[g, key] = fill
        for tier in self.tiers:
            if moved := parts.get(tier.config.tier):
                self._lease("load", tier, moved, fill)
        return {(piece.group, piece.key): name for name, moved in parts.items() for piece in moved}

    def ask(self, request_id: str, wanted: Sequence[GroupKey]) -> bool:
        """Ask tiers that others fill too what they hold; False if there is nothing to ask."""
        shared = [tier for tier in self.tiers if tier.shared]
        if not shared or not wanted:
            return False
        fill = self._fills[request_id] = Fill(request_id, 0)
        for tier in shared:
            self._lease("find", tier, [Moved(g, NULL_BLOCK, NULL_BLOCK, key) for g, key in wanted], fill)
        return True

    def abandon(self, request_id: str) -> None:
        """A request waits no longer; blocks on their way are let go, and can be found, when they have arrived."""
        for other in self._fills.values():
            if request_id in other.waiters:
                other.waiters.remove(request_id)
        fill = self._fills.pop(request_id, None)
        if fill is None:
            return
        for lease in self._leases.values():
            if lease.fill is fill:
                lease.state = LeaseState.QUARANTINED

    # Down.

    def plan_stores(self, now_s: float) -> None:
        """Begin to store what came free on the device, as far as the tiers keep up."""
        self._coming_free = None
        for g, pool in enumerate(self._device):
            spare = pool.num_free - int(pool.num_blocks * EVICTION_MARGIN)
            self._take_released(g, 0 if self.policy == "through" else max(0, spare))
        room = [math.ceil(pool.num_free * MAX_PINNED) for pool in self._device]
        for tier in self.tiers:
            while tier.num_stores < MAX_STORES and tier.accepts(now_s) and self._store(tier, tier.backlog, room):
                pass

    def demote(self, blocks: Sequence[GroupKey], now_s: float) -> None:
        """Begin to store the blocks of a preempted request, because they are about to be evicted."""
        self._coming_free = None
        for tier in self.tiers:
            missing = OrderedDict.fromkeys(pair for pair in blocks if tier.find(*pair) is None)
            room = [len(missing)] * len(self.groups)
            while tier.accepts(now_s) and tier.storing_bytes < MAX_DEMOTING_BYTES:
                if not self._store(tier, missing, room):
                    break

    def coming_free(self) -> list[int]:
        """Blocks of each group that nobody uses once they are stored, as far as stores are not stuck."""
        if self._coming_free is None:
            stuck: set[tuple[int, int]] = set()
            for lease in self._leases.values():
                if lease.kind == "store" and lease.tier.stuck:
                    stuck.update((piece.group, piece.block) for piece in lease.moved)
            self._coming_free = [
                sum(
                    1
                    for block, pins in self._pins[g].items()
                    if pool.num_references(block) == pins and (g, block) not in stuck
                )
                for g, pool in enumerate(self._device)
            ]
        return self._coming_free

    def _take_released(self, g: int, left: int) -> None:
        """Put released blocks, all but `left`, in the backlogs of tiers that lack them; known ones were of use."""
        pool = self._device[g]
        while len(pool.released) > left:
            block_id, _ = pool.released.popitem(last=False)
            key = pool.key(block_id)
            assert key is not None
            for tier in self.tiers:
                place = tier.find(g, key)
                if place is not None:
                    tier.pools[g].touch(place)
                elif tier.writable and (g, key) not in tier.storing:
                    tier.put_off((g, key), at_most=sum(pool.num_blocks for pool in self._device))

    def _store(self, tier: LowerTier, backlog: OrderedDict[GroupKey, None], room: list[int]) -> bool:
        """Begin one job from a backlog; False if there is nothing to store, or no room: `room[g]` is left to pin."""
        moved: list[Moved] = []
        num_bytes = 0
        while backlog:
            (g, key), _ = backlog.popitem(last=False)
            block, pool, device = self._device[g].find(key), tier.pools[g], self._device[g]
            if block is None:
                tier.counters.lost_blocks += 1
                continue
            if tier.find(g, key) is not None or (g, key) in tier.storing:
                continue
            over = moved and num_bytes + self.groups[g].block_bytes > MAX_STORE_BYTES
            if over or not pool.num_free or room[g] <= 0:
                backlog[g, key] = None
                backlog.move_to_end((g, key), last=False)
                break
            room[g] -= device.is_free(block)
            device.share([block])
            self._pins[g][block] += 1
            moved.append(Moved(g, block, pool.allocate(1)[0], key))
            num_bytes += self.groups[g].block_bytes
        if moved:
            tier.storing.update((piece.group, piece.key) for piece in moved)
            tier.num_stores += 1
            self._lease("store", tier, moved)
        return bool(moved)

    # Time.

    def overdue(self, now_s: float) -> list[str]:
        """Find out which tiers are stuck. Returns the requests that wait for those: they had better compute."""
        late = [lease for lease in self._leases.values() if now_s > lease.due_s]
        for tier in self.tiers:
            tier.stuck = any(lease.tier is tier for lease in late)
        fills = [lease.fill for lease in late if lease.fill and lease.state is LeaseState.FILLING]
        return list(dict.fromkeys(name for fill in fills for name in (fill.request_id, *fill.waiters)))

    # Leases.

    def _lease(self, kind: TransferKind, tier: LowerTier, moved: list[Moved], fill: Fill | None = None) -> None:
        """Begin a transfer for `fill`, or one that stores blocks to which it has the references already."""
        self._num_jobs += 1
        num_bytes = 0 if kind == "find" else sum(self.groups[piece.group].block_bytes for piece in moved)
        lease = Lease(self._num_jobs, kind, tier, moved, num_bytes, fill)
        if fill is not None:
            fill.num_leases += 1
        if kind == "load":
            tier.loading_bytes += num_bytes
            for piece in moved:
                self._device[piece.group].share([piece.block])
                tier.pools[piece.group].share([piece.place])
        elif kind == "store":
            tier.storing_bytes += num_bytes
        self._leases[lease.job_id] = lease
        self._outbox.append(
            TransferJob(
                job_id=lease.job_id,
                kind=kind,
                tier=tier.config.tier,
                groups=pack_ids([piece.group for piece in moved]),
                blocks=pack_ids([piece.block for piece in moved]),
                slots=pack_ids([piece.place - 1 for piece in moved]),
                keys=b"".join(piece.key for piece in moved),
            )
        )

    def take_jobs(self, now_s: float) -> list[TransferJob]:
        """Jobs to hand to the worker now."""
        self.plan_stores(now_s)
        jobs, self._outbox = self._outbox, []
        for job in jobs:
            lease = self._leases[job.job_id]
            before = lease.tier.loading_bytes + lease.tier.storing_bytes
            lease.due_s = now_s + PATIENCE_S + before / SLOWEST_BYTES_PER_S
            if lease.state is LeaseState.PREPARING:
                lease.state = LeaseState.FILLING
        return jobs

    def take_done(self, done: TransferDone, now_s: float) -> list[tuple[str, bool]]:
        """A transfer ended; returns who waited for it, and whether each got all that it waited for."""
        lease = self._leases.pop(done.job_id)
        if lease.kind == "store":
            self._stored(lease, done, now_s)
            return []
        if lease.kind == "clear":
            lease.tier.clearing = False
            return []
        if lease.kind == "find":
            held = [(piece.group, piece.key) for piece, ok in zip(lease.moved, done.done, strict=True) if ok]
            lease.tier.learn([] if lease.void else held)
        else:
            self._loaded(lease, done)
        return self._ended(lease, all(done.done) or lease.kind == "find", done.elapsed_s)

    def _stored(self, lease: Lease, done: TransferDone, now_s: float) -> None:
        tier = lease.tier
        tier.storing_bytes -= lease.num_bytes
        tier.num_stores -= 1
        for piece, ok in zip(lease.moved, done.done, strict=True):
            tier.storing.discard((piece.group, piece.key))
            if ok and not lease.void:
                tier.pools[piece.group].publish(piece.place, piece.key)
            elif not ok:
                tier.backlog[piece.group, piece.key] = None
            tier.pools[piece.group].free([piece.place])
            self._unpin(piece)
        self._coming_free = None
        tier.writable &= done.writable
        if tier.config.tier == "disk":  # it may be full, with room for slots that were used before
            for g in {piece.group for piece, ok in zip(lease.moved, done.done, strict=True) if not ok}:
                tier.pools[g].use_new_last()
        num_done, num_bytes = sum(done.done), self._num_bytes(lease, done)
        tier.counters.stored_blocks += num_done
        tier.counters.failed_blocks += len(done.done) - num_done
        tier.counters.stored_bytes += num_bytes
        tier.counters.store_s += done.elapsed_s
        if num_done:
            tier.succeeded()
        else:
            tier.failed(now_s)

    def _unpin(self, piece: Moved) -> None:
        """Let go of a device block that was stored. With policy `eviction` it is then the next to be evicted."""
        pool, pins = self._device[piece.group], self._pins[piece.group]
        pins[piece.block] -= 1
        if not pins[piece.block]:
            del pins[piece.block]
        pool.free([piece.block])
        pool.released.pop(piece.block, None)
        if self.policy == "eviction":
            pool.touch(piece.block, last=False)

    def _loaded(self, lease: Lease, done: TransferDone) -> None:
        tier = lease.tier
        tier.loading_bytes -= lease.num_bytes
        for piece, ok in zip(lease.moved, done.done, strict=True):
            if self._filling.get((piece.group, piece.key)) is lease.fill:
                del self._filling[piece.group, piece.key]
            if ok and not lease.void:
                self._device[piece.group].publish(piece.block, piece.key)
                self._device[piece.group].keep(piece.block)
            elif not ok and tier.find(piece.group, piece.key) == piece.place:
                tier.pools[piece.group].drop(piece.place)
        for piece in reversed(lease.moved):
            tier.pools[piece.group].free([piece.place])
            self._device[piece.group].free([piece.block])
        num_done, num_bytes = sum(done.done), self._num_bytes(lease, done)
        tier.counters.loaded_blocks += num_done
        tier.counters.failed_blocks += len(done.done) - num_done
        tier.counters.loaded_bytes += num_bytes
        tier.counters.load_s += done.elapsed_s
        if num_done:
            tier.load_rate.add(num_bytes, done.elapsed_s)

    def _num_bytes(self, lease: Lease, done: TransferDone) -> int:
        """Bytes of the pieces that were moved."""
        pieces = zip(lease.moved, done.done, strict=True)
        return sum(self.groups[piece.group].block_bytes for piece, ok in pieces if ok)

    def _ended(self, lease: Lease, ok: bool, elapsed_s: float) -> list[tuple[str, bool]]:
        """Names who waited, when the last lease of a fill has ended."""
        fill = lease.fill
        assert fill is not None
        fill.num_leases -= 1
        fill.failed |= not ok
        fill.ended.append((lease, elapsed_s))
        if fill.num_leases:
            return []
        waiters = [(request_id, True) for request_id in fill.waiters]
        if lease.state is LeaseState.QUARANTINED:
            return waiters
        del self._fills[fill.request_id]
        if not fill.failed:
            self._credit(fill)
        return [(fill.request_id, not fill.failed), *waiters]

    def _credit(self, fill: Fill) -> None:
        """Time that a fill spared belongs to each tier as far as the bytes were its own, less what it took for them."""
        num_bytes = sum(lease.num_bytes for lease, _ in fill.ended)
        for lease, elapsed_s in fill.ended if num_bytes else ():
            lease.tier.spared_tokens += fill.num_tokens * lease.num_bytes / num_bytes
            lease.tier.spent_s += elapsed_s
        self._count_saved()

    def _count_saved(self) -> None:
        """What tokens are worth is known once some were computed: after a restart, loads come before that."""
        for tier in self.tiers if self.prefill_rate.measured else ():
            tier.counters.saved_s += self.prefill_rate.seconds(tier.spared_tokens) - tier.spent_s
            tier.spared_tokens = tier.spent_s = 0.0

    def clear(self, tier_names: Collection[Tier]) -> None:
        """Forget what some lower tiers hold, and have their stores forget it. What is on its way is not published."""
        for lease in self._leases.values():
            lease.void |= "device" in tier_names or lease.tier.config.tier in tier_names
        for tier in self.tiers:
            if tier.config.tier in tier_names:
                self._clear(tier)

    def _clear(self, tier: LowerTier) -> None:
        """Until the store has done so too, what it says it holds does not count."""
        tier.clearing = True
        tier.backlog.clear()
        for pool in tier.pools:
            pool.drop_all()
        self._lease("clear", tier, [])

    def note_hits(self, sources: Counter[Tier]) -> None:
        """A request starts with so many tokens from each tier."""
        for tier in self.tiers:
            tier.counters.hit_tokens += sources[tier.config.tier]

    # Views.

    def is_idle(self, now_s: float) -> bool:
        """Whether nothing moves and nothing waits to be stored where it can be."""
        return not self._leases and not any(tier.backlog for tier in self.tiers if tier.accepts(now_s))

    def references(self, g: int) -> Counter[int]:
        """Device blocks of group g that leases refer to."""
        moving = (lease for lease in self._leases.values() if lease.kind in ("load", "store"))
        return Counter(piece.block for lease in moving for piece in lease.moved if piece.group == g)

    def check(self) -> None:
        """Assert in every tier and group: free + held + in use = total, and references equal those of leases.

        A pool that holds more than CHECKED_BLOCKS is left out: a request that comes meanwhile would wait for it.
        """
        for tier in self.tiers:
            moving = [
                lease for lease in self._leases.values() if lease.tier is tier and lease.kind in ("load", "store")
            ]
            for g, pool in enumerate(tier.pools):
                if pool.num_published <= CHECKED_BLOCKS:
                    pool.check(Counter(piece.place for lease in moving for piece in lease.moved if piece.group == g))
            assert tier.storing_bytes == sum(lease.num_bytes for lease in moving if lease.kind == "store")
            assert tier.loading_bytes == sum(lease.num_bytes for lease in moving if lease.kind == "load")
        moving_to = {(piece.group, piece.key) for lease in self._leases.values() for piece in lease.moved}
        assert self._filling.keys() <= moving_to, "a block is said to come, but nothing brings it"
