"""ActiveTransfers: owner of the transfers between tiers that have been decided and have not ended."""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pypto_serving.kv.group import KVGroup
from pypto_serving.kv.lower_tier import LowerTier
from pypto_serving.types.arrays import pack_ids
from pypto_serving.types.tier import TransferJob, TransferKind

SLOWEST_BYTES_PER_S = 50e6
"""A transfer is overdue after its time-out and the time that a tier of this speed takes for all on its way there."""

MOVES: tuple[TransferKind, ...] = ("load", "store")
"""Transfers that hold references to blocks."""


class TransferState(enum.Enum):
    """PREPARING: decided. FILLING: sent to the worker. QUARANTINED: nobody waits, but the worker may still write."""

    PREPARING = "preparing"
    FILLING = "filling"
    QUARANTINED = "quarantined"


class Moved(NamedTuple):
    """One block of a transfer: its id on the device, and its id in the tier's pool."""

    group: KVGroup
    block: int
    tier_block: int
    key: bytes


class Wanted(NamedTuple):
    """A device block to be filled with the content that `key` names."""

    group: KVGroup
    block: int
    key: bytes


@dataclass(slots=True, eq=False)
class Transfer:
    """One transfer, which holds a reference to each of its blocks on both sides until it ends.

    `moved` is in order of position for a load, and reversed for a store: the front of a sequence is freed last, and so
    evicted last. A `void` transfer publishes nothing, since its blocks were to be forgotten. It is overdue at `due_s`.
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
    """The transfers that request `request_id` began. They spare computing `num_tokens`.

    `num_transfers` of them have not ended; `ended` are the others, with the seconds that each took.
    """

    request_id: str
    num_tokens: int
    num_transfers: int = 0
    failed: bool = False
    ended: list[tuple[Transfer, float]] = field(default_factory=list)


class ActiveTransfers:
    """Owns every Transfer until it ends, and the jobs that were not handed to the worker yet.

    A transfer that hangs keeps its device blocks. So all transfers together leave `longest_blocks` of each group free,
    enough for one sequence of the longest length. A load may exceed this if it is the only one; if such a load is
    overdue after `timeout_s` and nothing can run for want of its blocks, the worker is replaced.
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
        """Decide a transfer, as a part of `fill` if given. It takes over a reference to each block that it moves."""
        self._num_jobs += 1
        num_bytes = 0 if kind == "find" else sum(piece.group.block_bytes for piece in moved)
        self._transfers[self._num_jobs] = Transfer(self._num_jobs, kind, tier, moved, num_bytes, fill)
        if fill is not None:
            fill.num_transfers += 1
        tier.on_the_way(kind, num_bytes)
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
        """Return the jobs to hand to the worker now. From now on it may write."""
        jobs, self._outbox = self._outbox, []
        for job in jobs:
            transfer = self._transfers[job.job_id]
            before = transfer.tier.loading_bytes + transfer.tier.storing_bytes
            transfer.due_s = now_s + self._timeout_s + before / SLOWEST_BYTES_PER_S
            if transfer.state is TransferState.PREPARING:
                transfer.state = TransferState.FILLING
        return jobs

    def end(self, job_id: int) -> Transfer:
        """Remove the transfer of a job that ended. The caller frees its blocks."""
        transfer = self._transfers.pop(job_id)
        transfer.tier.on_the_way(transfer.kind, -transfer.num_bytes)
        for group, block, _, _ in transfer.moved if transfer.kind in MOVES else ():
            held = self._held[group]
            held[block] -= 1
            if not held[block]:
                del held[block]
        return transfer

    def block_budget(self, group: KVGroup) -> int:
        """Count the device blocks that further transfers may hold."""
        return group.pool.num_blocks - self._longest[group] - len(self._held[group])

    @property
    def num_loads(self) -> int:
        """Number of loads that have not ended."""
        return sum(1 for transfer in self if transfer.kind == "load")

    def abandon(self, fill: Fill) -> None:
        """Quarantine the transfers of a fill that nobody waits for any more."""
        for transfer in self:
            if transfer.fill is fill:
                transfer.state = TransferState.QUARANTINED

    def forget_all(self) -> None:
        """Drop all transfers, since the worker is gone, and free their slots in host memory, which stays."""
        for transfer in self:
            for piece in transfer.moved if transfer.tier.config.tier == "host" else ():
                transfer.tier.pools[piece.group].free([piece.tier_block])
        self._transfers.clear()
        self._outbox.clear()
        for held in self._held.values():
            held.clear()

    def moving(self, tier: LowerTier | None = None) -> list[Transfer]:
        """Return the transfers that hold references to blocks, of one tier or of all."""
        return [transfer for transfer in self if transfer.kind in MOVES and tier in (None, transfer.tier)]

    def references(self, group: KVGroup) -> Counter[int]:
        """Count the references to device blocks of a group."""
        counted = Counter(piece.block for transfer in self.moving() for piece in transfer.moved if piece.group is group)
        assert counted == self._held[group], "transfers hold other blocks than they count"
        return counted

    def check(self, tier: LowerTier) -> None:
        """Assert that a tier counts the bytes on their way as its transfers do."""
        moving = self.moving(tier)
        assert tier.storing_bytes == sum(transfer.num_bytes for transfer in moving if transfer.kind == "store")
        assert tier.loading_bytes == sum(transfer.num_bytes for transfer in moving if transfer.kind == "load")
