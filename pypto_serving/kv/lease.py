"""Leases and fills: what is on its way between tiers. Changed by TierManager alone."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import NamedTuple

from pypto_serving.kv.lower import LowerTier
from pypto_serving.types.tier import TransferKind


class LeaseState(enum.Enum):
    """Of a lease: decided; handed over, so that somebody writes; somebody may still write what nobody waits for."""

    PREPARING = "preparing"
    FILLING = "filling"
    QUARANTINED = "quarantined"


class Moved(NamedTuple):
    """One block of a lease: device block and, in the tier's pool, its place."""

    group: int
    block: int
    place: int
    key: bytes


@dataclass(slots=True)
class Lease:
    """Blocks of both sides that a transfer holds one reference to each, until it is done.

    `moved` is in order of position for loads, and the other way round, as blocks come free, for stores: the front of a
    sequence is let go last, and so evicted last. What a `void` lease brings is not published: it was to be forgotten.
    After `due_s` its tier counts as stuck.
    """

    job_id: int
    kind: TransferKind
    tier: LowerTier
    moved: list[Moved]
    num_bytes: int
    fill: Fill | None
    state: LeaseState = LeaseState.PREPARING
    due_s: float = math.inf
    void: bool = False


@dataclass(slots=True)
class Fill:
    """What a request waits for: leases, that spare computing `num_tokens`. `waiters` want some of the same blocks.

    Of its leases, `num_leases` have not ended; `ended` has those that have, with the seconds that each took.
    """

    request_id: str
    num_tokens: int
    num_leases: int = 0
    failed: bool = False
    ended: list[tuple[Lease, float]] = field(default_factory=list)
    waiters: list[str] = field(default_factory=list)


class Wanted(NamedTuple):
    """A device block to be filled with the content that `key` names."""

    group: int
    block: int
    key: bytes
