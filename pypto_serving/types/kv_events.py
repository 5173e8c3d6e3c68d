"""Events of cached blocks, for routers that follow a replica's cache."""

from __future__ import annotations

import msgspec

from pypto_serving.types.tier import Tier


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
