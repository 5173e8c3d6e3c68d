"""Tiers below the device, and the wires on which blocks are moved between them.

All integer arrays are little-endian bytes: int32 for block ids, groups and slots, uint8 for flags; a key is 16 bytes.
A slot is where a tier keeps one block of a group: an index in [0, num_slots[group]), lent by the engine core. Stores
that find blocks by key alone (remote ones) ignore it.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

Tier = Literal["device", "host", "disk", "remote"]
TIERS: tuple[Tier, ...] = ("device", "host", "disk", "remote")
"""From fast to slow."""

KEY_BYTES = 16
ALIGNMENT = 4096
"""Blocks in tiers begin at multiples of this many bytes, as direct I/O wants."""
INDEX_BYTES = 64
"""What a disk tier keeps for each slot, beside the block."""
PART_NAME = re.compile(r"[0-9a-f]{32}")
"""Names of folders of blocks in the folder that a user gave to the disk tier, one for each fingerprint."""

StorePolicy = Literal["through", "eviction"]
"""When a block that nobody uses is stored in lower tiers: soon, or when it is about to be evicted."""


class TierConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One tier below the device. `num_slots[g]` blocks of group g fit; `place` is a folder or the URL of a store."""

    tier: Tier
    size_bytes: int
    num_slots: tuple[int, ...]
    place: str = ""


TransferKind = Literal["load", "store", "find", "clear"]


class TransferJob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Blocks to move between the device and `tier`, all at once: pieces i of `groups`, `blocks`, `slots` and `keys`.

    `load` fills device blocks, `store` reads them. `find` moves nothing: it asks which keys the tier holds;
    `clear`, without blocks, has it forget all.
    """

    job_id: int
    kind: TransferKind
    tier: Tier
    groups: bytes
    blocks: bytes
    slots: bytes
    keys: bytes


class Transfers(msgspec.Struct, frozen=True, array_like=True, tag="transfers"):
    """Jobs. One that loads begins when step `after_step` is done: until then, steps may write to its blocks."""

    epoch: int
    after_step: int
    jobs: list[TransferJob]


class TransferDone(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`done[i]` is 1 where piece i was moved, or found. `elapsed_s` counts from when the first of them was begun.

    The store is not `writable` any more after an error that will not pass.
    """

    job_id: int
    done: bytes
    elapsed_s: float
    writable: bool = True


class TransferReport(msgspec.Struct, frozen=True, array_like=True, tag="transferred"):
    """Jobs that ended."""

    epoch: int
    transfers: list[TransferDone]


class TierInventory(msgspec.Struct, frozen=True, array_like=True):
    """What a store holds at its start, least recently used first; `groups`, `slots`, `keys` as in a job.

    A store that is not `writable`, for `reason`, only loads. `shared` is true where others may add blocks, so that
    what is not in the inventory may still be found.
    """

    tier: Tier
    groups: bytes = b""
    slots: bytes = b""
    keys: bytes = b""
    writable: bool = True
    shared: bool = False
    reason: str = ""
