"""Tiers below the device, the messages that move blocks between tiers, and events of cached blocks.

Integer arrays are little-endian bytes: int32 for block ids, groups and slots, uint8 for flags. A key is 16 bytes.
A slot is the place of one block of a group in a tier: an index in [0, num_slots[group]), assigned by the engine core.
Remote stores ignore slots and find blocks by key.
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
"""Blocks in lower tiers begin at multiples of this many bytes, as direct I/O requires."""
INDEX_BYTES = 64
"""Bytes of the disk tier's record of one slot, stored apart from the block."""
PART_NAME = re.compile(r"[0-9a-f]{32}")
"""Name of the folder with the blocks of one fingerprint, inside the user's folder for the disk tier."""

StorePolicy = Literal["through", "eviction"]
"""When to store a free block in lower tiers: soon (`through`), or when it is about to be evicted (`eviction`)."""


class TierConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One tier below the device, with `num_slots[g]` slots for group g. `place`: a folder, or the URL of a store."""

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
    """Blocks to move between the device and `tier` in one call. Element i of each array describes piece i.

    - `load` copies blocks from the tier to the device; `store` copies them from the device to the tier.
    - `find` moves nothing, but asks which keys the tier holds.
    - `clear` has no pieces, and makes the tier forget all blocks.
    """

    job_id: int
    kind: TransferKind
    tier: Tier
    groups: bytes
    blocks: bytes
    slots: bytes
    keys: bytes


class Transfers(msgspec.Struct, frozen=True, array_like=True, tag="transfers"):
    """Jobs for the worker. Loads begin after step `after_step`, since earlier steps may still write to their blocks."""

    epoch: int
    after_step: int
    jobs: list[TransferJob]


class TransferDone(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The end of a job: `done[i]` is 1 if piece i was moved or found. `elapsed_s` counts from the first piece.

    `writable` turns False after an error that is not transient.
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
    """The blocks that a store holds at its start, least recently used first; arrays as in TransferJob.

    A store that is not `writable`, because of `reason`, only loads. Other servers add blocks to a `shared` store, so it
    may hold more than this. A `left_out` tier has no store in this life of the worker.
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
    """Tier `tier` holds a new block of group `group`: `token_ids` (int32 bytes) follow the tokens of block `parent`.

    Keys are 16 bytes; `parent` is empty for the first block of a sequence. A `salted` block belongs to one tenant.
    """

    tier: Tier
    group: int
    key: bytes
    parent: bytes
    token_ids: bytes
    salted: bool = False


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag="removed", gc=False):
    """Tier `tier` no longer holds the block `key` of group `group`."""

    tier: Tier
    group: int
    key: bytes


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag="cleared", gc=False):
    """Tier `tier` holds no blocks any more."""

    tier: Tier


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared
