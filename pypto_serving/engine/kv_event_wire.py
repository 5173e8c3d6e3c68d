"""Encode KV events in vLLM's format, for routers and indexers (vllm/distributed/kv_events.py).

A batch is msgpack `[seconds since the epoch, [events], data parallel rank]`; an event is a map with its `type`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from pypto_serving.types.arrays import unpack_ids
from pypto_serving.types.kv import CompressedSpec, FullSpec, KVCacheGroupSpec, StateSpec, WindowSpec
from pypto_serving.types.tier import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, Tier

MEDIUMS: dict[Tier, str] = {"device": "GPU", "host": "CPU", "disk": "DISK", "remote": "EXTERNAL"}
"""Every device is called GPU, since readers drop names that they do not know."""


class StoredMap(msgspec.Struct, tag="BlockStored", omit_defaults=True, gc=False):
    """A chain of stored blocks, each the parent of the next. `token_ids` has `block_size` ids per block.

    Readers count blocks of full attention. For groups above 0 they need `kv_cache_spec_kind` to tell.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    group_idx: int
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class RemovedMap(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: list[int]
    medium: str
    group_idx: int


class ClearedMap(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


EventMap = StoredMap | RemovedMap | ClearedMap


def block_hash(key: bytes) -> int:
    """Return the low 64 bits of a key read as a big-endian number (its last 8 bytes), as vLLM shortens its hashes."""
    return int.from_bytes(key[-8:], "big")


def encode_batch(events: Sequence[EventMap], time_s: float, replica: int) -> bytes:
    """Encode one batch of a replica. `time_s` is in seconds since the epoch."""
    return msgspec.msgpack.encode((time_s, events, replica))


class KVEventWriter:
    """Owns the record of announced blocks, by tier and group. Converts events to vLLM's maps.

    - Salted blocks are not announced, since readers would count them for requests of other tenants.
    - AllBlocksCleared has no medium in vLLM's format, and readers disagree on what it clears besides the device. So it
      is written only when no other tier holds anything. Otherwise the blocks of the tier are removed by name.
    """

    def __init__(self, groups: Sequence[KVCacheGroupSpec]) -> None:
        self._groups = groups
        self._kinds = [spec_kind(groups, g) for g in range(len(groups))]
        self._held: dict[tuple[Tier, int], set[int]] = {}

    def write(self, events: Iterable[KVEvent]) -> list[EventMap]:
        """Convert `events` to maps, in order. Join neighbouring events of the same kind, group and medium."""
        maps: list[EventMap] = []
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event, maps)
            elif isinstance(event, BlockRemoved):
                self._remove(event, maps)
            else:
                self._clear(event, maps)
        return maps

    def _store(self, event: BlockStored, maps: list[EventMap]) -> None:
        if event.salted:
            return
        key_hash, parent = block_hash(event.key), block_hash(event.parent) if event.parent else None
        self._held.setdefault((event.tier, event.group), set()).add(key_hash)
        token_ids, medium = unpack_ids(event.token_ids).tolist(), MEDIUMS[event.tier]
        last, place = maps[-1] if maps else None, (parent, event.group, medium)
        if isinstance(last, StoredMap) and (last.block_hashes[-1], last.group_idx, last.medium) == place:
            last.block_hashes.append(key_hash)
            last.token_ids += token_ids
            return
        group = self._groups[event.group]
        maps.append(
            StoredMap(
                [key_hash],
                parent,
                token_ids,
                group.block_size,
                None,
                medium,
                None,
                event.group,
                self._kinds[event.group],
                group.window if isinstance(group, WindowSpec) else None,
            )
        )

    def _remove(self, event: BlockRemoved, maps: list[EventMap]) -> None:
        held, key_hash = self._held.get((event.tier, event.group)), block_hash(event.key)
        if held is None or key_hash not in held:
            return
        held.discard(key_hash)
        medium, last = MEDIUMS[event.tier], maps[-1] if maps else None
        if isinstance(last, RemovedMap) and (last.group_idx, last.medium) == (event.group, medium):
            last.block_hashes.append(key_hash)
        else:
            maps.append(RemovedMap([key_hash], medium, event.group))

    def _clear(self, event: AllBlocksCleared, maps: list[EventMap]) -> None:
        gone = {group: held for (tier, group), held in self._held.items() if tier == event.tier and held}
        self._held = {place: held for place, held in self._held.items() if held and place[0] != event.tier}
        if not self._held:
            maps.append(ClearedMap())
            return
        maps += [RemovedMap(list(held), MEDIUMS[event.tier], group) for group, held in gone.items()]


_VLLM_KINDS = {
    FullSpec: "full_attention",
    CompressedSpec: "mla_attention",
    WindowSpec: "sliding_window",
    StateSpec: "mamba",
}


def spec_kind(groups: Sequence[KVCacheGroupSpec], g: int) -> str | None:
    """Return vLLM's name for the kind of group g. Only the first group that keeps its history has one that is counted.

    Readers index one prefix per replica; a second group of full history would count the same prefix again.
    """
    group = groups[g]
    if group.keeps_history and any(other.keeps_history for other in groups[:g]):
        return None
    return _VLLM_KINDS[type(group)]
