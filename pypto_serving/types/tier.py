"""Tiers below the device, the wires on which blocks are moved between them, and events of cached blocks.

All integer arrays are little-endian bytes: int32 for block ids, groups and slots, uint8 for flags; a key is 16 bytes.
A slot is the place of one block of a group in a tier: an index in [0, num_slots[group]), which the engine core assigns.
Remote stores find blocks by key and ignore it.
"""

from __future__ import annotations

import re
from typing import Literal
from urllib.parse import parse_qsl, urlsplit

import msgspec

from pypto_serving.util import parse_size

Tier = Literal["device", "host", "disk", "remote"]
TIERS: tuple[Tier, ...] = ("device", "host", "disk", "remote")
"""From fast to slow."""

KEY_BYTES = 16
ALIGNMENT = 4096
"""Blocks in tiers begin at multiples of this many bytes, as direct I/O wants."""
INDEX_BYTES = 64
"""Size of the disk tier's record of a slot, which lies beside the block."""
PART_NAME = re.compile(r"[0-9a-f]{32}")
"""Name of the folder of one fingerprint's blocks, inside the folder that the user gave to the disk tier."""

StorePolicy = Literal["through", "eviction"]
"""When a free block is stored in lower tiers: `through` soon, `eviction` when it is about to be evicted."""


class TierConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One tier below the device. It has `num_slots[g]` slots for group g; `place` is a folder or the URL of a store."""

    tier: Tier
    size_bytes: int
    num_slots: tuple[int, ...]
    place: str = ""


POOL_PARAMETERS = ("metadata_server", "protocol", "device", "local_hostname", "segment_size")


def parse_pool_url(url: str) -> tuple[str, int | None, dict[str, str]]:
    """Return host, port and parameters of `mooncake://HOST[:PORT][?NAME=VALUE&...]`. Raises ValueError."""
    parts = urlsplit(url)
    given = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    if parts.scheme != "mooncake" or not parts.hostname or parts.path.strip("/") or parts.fragment:
        raise ValueError(f"{url} is no address of a pool")
    if not given.keys() <= set(POOL_PARAMETERS):
        raise ValueError(f"{url} has unknown parameters")
    parse_size(given.get("segment_size", "0"))
    return parts.hostname, parts.port, given


TransferKind = Literal["load", "store", "find", "clear"]


class TransferJob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Blocks to move between the device and `tier` in one call; piece i has element i of each array.

    - `load` fills device blocks from the tier, `store` copies them to it.
    - `find` moves nothing: it asks which keys the tier holds.
    - `clear` has no pieces: the tier forgets all blocks.
    """

    job_id: int
    kind: TransferKind
    tier: Tier
    groups: bytes
    blocks: bytes
    slots: bytes
    keys: bytes


class Transfers(msgspec.Struct, frozen=True, array_like=True, tag="transfers"):
    """Jobs for the worker. Loads begin after step `after_step`: until then, steps may write to the blocks they fill."""

    epoch: int
    after_step: int
    jobs: list[TransferJob]


class TransferDone(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The end of a job: `done[i]` is 1 where piece i was moved or found. `elapsed_s` counts from the first piece.

    The store is no longer `writable` after an error that is not transient.
    """

    job_id: int
    done: bytes
    elapsed_s: float
    writable: bool = True


class TransferReport(msgspec.Struct, frozen=True, array_like=True, tag="transferred"):
    """The jobs that ended since the last report."""

    epoch: int
    transfers: list[TransferDone]


class TierInventory(msgspec.Struct, frozen=True, array_like=True):
    """The blocks that a store holds at its start, the least recently used first; arrays as in a job.

    A store that is not `writable`, for `reason`, only loads. Others add blocks to a `shared` store, so it may hold more
    than its inventory says. A tier that is `left_out` of this life of the worker has no store.
    """

    tier: Tier
    groups: bytes = b""
    slots: bytes = b""
    keys: bytes = b""
    writable: bool = True
    shared: bool = False
    reason: str = ""
    left_out: bool = False


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag="stored", gc=False):
    """Tier `tier` holds one more block of group `group`, with `token_ids` (int32 bytes) after those of block `parent`.

    Keys are 16 bytes; `parent` is empty for the first block of a sequence. `salted` blocks belong to one tenant.
    """

    tier: Tier
    group: int
    key: bytes
    parent: bytes
    token_ids: bytes
    salted: bool = False


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag="removed", gc=False):
    """Tier `tier` no longer holds the block of group `group` that `key` names."""

    tier: Tier
    group: int
    key: bytes


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag="cleared", gc=False):
    """Tier `tier` holds nothing any more."""

    tier: Tier


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared
