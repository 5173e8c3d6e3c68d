"""Choose block sizes, tiers below the device, and endpoints of KV events."""

from __future__ import annotations

from itertools import product

import msgspec

from pypto_serving.backend.defaults import BackendDefaults
from pypto_serving.errors import ConfigError
from pypto_serving.setup.host import DiskFacts, HostFacts
from pypto_serving.setup.kv_shares import tier_slots
from pypto_serving.setup.option_table import REMOTE_BLOCK_BYTES
from pypto_serving.setup.options import Options, Settings
from pypto_serving.setup.rules import MAX_PORT
from pypto_serving.types.config import EngineConfig, ServerConfig
from pypto_serving.types.kv import KVCacheGroupSpec
from pypto_serving.types.model import ModelSpec
from pypto_serving.types.tier import INDEX_BYTES, Tier, TierConfig
from pypto_serving.util import format_size, install_extra

LARGEST_BLOCK = 1024
"""Limit of the block size, in tokens, if the user does not choose it."""


def choose_block_size(settings: Settings, model: ModelSpec, backend: BackendDefaults) -> ModelSpec:
    """Return `model` with the block sizes to use; warn of blocks that a remote store moves slowly."""
    if backend.traits.page_tokens:
        return _in_pages(settings, model, backend.traits.page_tokens)
    options, (group, *others) = settings.options, model.kv_groups
    own = "of the first KV group; each has its own" if model.own_blocks else "default"
    reason = settings.origin_or("block_size", own)
    if options.kv_remote and not others and group.block_bytes < REMOTE_BLOCK_BYTES and options.block_size is None:
        group, reason = _larger_block(group, options.given_length or model.max_position_embeddings)
        model = msgspec.structs.replace(model, kv_groups=(group,))
    elif options.kv_remote:
        _warn_of_small_blocks(settings, model)
    settings.record("block_size", group.block_size, reason)
    return model


def _in_pages(settings: Settings, model: ModelSpec, size: int) -> ModelSpec:
    """Give every group the block size that the backend requires. Raises ConfigError if the user chose another."""
    if settings.options.block_size not in (None, size):
        problem = f"is {settings.options.block_size}, but this backend has blocks of {size}; drop it"
        raise settings.options.refusal("block_size", problem)
    settings.record("block_size", size, settings.origin_or("block_size", "what the backend has"))
    groups = tuple(msgspec.structs.replace(group, block_size=size) for group in model.kv_groups)
    return msgspec.structs.replace(model, kv_groups=groups)


def _larger_block(group: KVCacheGroupSpec, longest: int) -> tuple[KVCacheGroupSpec, str]:
    """Double the block size until blocks are large enough, up to half of the `longest` sequence; return the reason."""
    while group.block_bytes < REMOTE_BLOCK_BYTES and 2 * group.block_size <= min(LARGEST_BLOCK, longest // 2):
        group = msgspec.structs.replace(group, block_size=2 * group.block_size)
    reason = f"kv-remote moves blocks of {format_size(REMOTE_BLOCK_BYTES)} and more at full speed"
    if group.block_bytes < REMOTE_BLOCK_BYTES:
        reason += f"; at most {LARGEST_BLOCK} tokens, and half of max-model-len"
    return group, reason


def _warn_of_small_blocks(settings: Settings, model: ModelSpec) -> None:
    fast, remote = format_size(REMOTE_BLOCK_BYTES), settings.options.label("kv_remote")
    small = [group for group in model.kv_groups if group.block_bytes < REMOTE_BLOCK_BYTES]
    if small and len(model.kv_groups) > 1:
        names = ", ".join(group.name for group in small)
        settings.warnings.append(f"{remote} moves blocks of {fast} and more at full speed; those of {names} are less")
    elif small:
        settings.warnings.append(
            f"{settings.options.label('block_size')} {small[0].block_size} makes blocks of "
            f"{format_size(small[0].block_bytes)}; {remote} moves those of {fast} and more at full speed"
        )


MAX_SLOTS = 1 << 22
"""Limit of blocks of one group in one tier; the disk tier keeps INDEX_BYTES in memory for each."""
REMOTE_BYTES, REMOTE_BLOCKS = 1 << 40, 1 << 16
"""Limits of the engine core's record of a remote store, which has a size of its own: bytes, and blocks per group."""


def choose_tiers(
    settings: Settings, model: ModelSpec, host: HostFacts, backend: BackendDefaults, host_bytes: int
) -> tuple[TierConfig, ...]:
    """Choose the tiers, from fast to slow, with `host_bytes` of host memory. Raises ConfigError for impossible ones."""
    options = settings.options
    disk_bytes = _record(settings, backend, host_bytes)
    if options.kv_disk_size and not options.kv_disk:
        folder = options.label("kv_disk", beside="kv_disk_size")
        raise ConfigError(f"{options.label('kv_disk_size')} needs a folder; give {folder} too, or drop it")
    tiers = []
    if host_bytes:
        tiers.append(_tier(settings, model, "host", "kv_host_memory", host_bytes))
    if options.kv_disk:
        tiers.append(_tier(settings, model, "disk", "kv_disk_size", disk_bytes, options.kv_disk))
        if host.kv_disk is not None:
            _check_disk(settings, model, host.kv_disk, tiers[-1])
    if options.kv_remote:
        if not host.mooncake:
            problem = f"needs Mooncake, and Mooncake is not installed; drop it, or {install_extra('mooncake')}"
            raise options.refusal("kv_remote", f"is {options.kv_remote}, which {problem}")
        tiers.append(_tier(settings, model, "remote", "kv_remote", REMOTE_BYTES, options.kv_remote))
    if tiers and options.prefix_caching is False:
        given = [options.label(name) for name in ("kv_host_memory", "kv_disk", "kv_remote") if getattr(options, name)]
        off = options.giving("prefix_caching", False)
        raise ConfigError(
            "tiers of the KV cache find blocks by prefix, but prefix caching is off; "
            f"drop {' and '.join(given)}, or drop {off}"
        )
    return tuple(tiers)


def _record(settings: Settings, backend: BackendDefaults, host_bytes: int) -> int:
    """Record all options of tiers; return the size of the disk tier."""
    off = "off, because the device's memory is host memory; see kv-memory" if backend.in_host_memory else "default"
    reason = settings.origin_or("kv_host_memory", off)
    settings.record("kv_host_memory", format_size(host_bytes) if host_bytes else False, reason)
    settings.pick_fixed("kv_disk")
    settings.pick_fixed("kv_remote")
    disk_bytes: int = settings.pick_fixed("kv_disk_size")
    return disk_bytes


def _tier(
    settings: Settings, model: ModelSpec, tier: Tier, option: str, size_bytes: int, place: str = ""
) -> TierConfig:
    """Divide `size_bytes` among the groups. Raises ConfigError about `option` if a block of history does not fit."""
    largest = REMOTE_BLOCKS if tier == "remote" else MAX_SLOTS
    slots = tuple(min(count, largest) for count in tier_slots(model.kv_groups, size_bytes))
    for group, count in zip(model.kv_groups, slots, strict=True):
        if group.keeps_history and count == 0:
            problem = f"too little for a block of KV group {group.name}, which has {format_size(group.block_bytes)}"
            raise settings.options.refusal(option, f"is {format_size(size_bytes)}, {problem}; give more")
    return TierConfig(tier=tier, size_bytes=size_bytes, num_slots=slots, place=place)


def _check_disk(settings: Settings, model: ModelSpec, disk: DiskFacts, tier: TierConfig) -> None:
    """Raise ConfigError for a folder that is neither writable nor has blocks; warn of a disk that is too small.

    Existing blocks are part of the tier, so the limit of a used folder is the size of the disk, not its free space.
    """
    options, label = settings.options, f"{settings.options.label('kv_disk')} is {tier.place}"
    size = options.label("kv_disk_size")
    room_bytes, part = (disk.disk_bytes, "in all") if disk.used else (disk.free_bytes, "left")
    if room_bytes and tier.size_bytes > room_bytes:
        settings.warnings.append(
            f"{size} is {format_size(tier.size_bytes)}, but the disk of {tier.place} has {format_size(room_bytes)} "
            f"{part}; blocks are kept until it is full"
        )
    if disk.used:
        return
    if disk.obstacle:
        raise ConfigError(f"{label}, which cannot be used: {disk.obstacle}; give a folder that can be written")
    needed = sum(group.block_bytes for group in model.kv_groups) + INDEX_BYTES * sum(tier.num_slots)
    if disk.free_bytes < needed:
        raise ConfigError(
            f"{label}, whose disk has {format_size(disk.free_bytes)} left, but one block and the index take "
            f"{format_size(needed)}; free some, lower {size}, or give another folder"
        )


def choose_events(settings: Settings, num_replicas: int) -> tuple[str, str]:
    """Choose the endpoints of KV events and of their replay for the first replica, or "".

    The other replicas use the following ports. By default, replays use the ports after those of all events.
    """
    options = settings.options
    endpoint, replay = options.kv_events or "", options.kv_events_replay or ""
    if replay and not endpoint:
        events = options.label("kv_events", beside="kv_events_replay")
        raise ConfigError(f"{options.label('kv_events_replay')} needs {events}; give it, or drop this")
    if endpoint and options.prefix_caching is False:
        label, off = options.label("kv_events"), options.giving("prefix_caching", False)
        raise ConfigError(f"{label} shows what the prefix cache holds, which is off; drop it or {off}")
    settings.pick_fixed("kv_events")
    reason = settings.origin_or("kv_events_replay", "beside kv-events" if endpoint else "default")
    if endpoint and not replay:
        replay = _beside(endpoint, num_replicas)
        if not replay:
            beside = options.label("kv_events_replay", beside="kv_events")
            raise ConfigError(f"{options.label('kv_events')} is {endpoint}, so give {beside} as well")
    elif replay and any(
        _clash(endpoint_of(replay, i), endpoint_of(endpoint, j)) for i, j in product(range(num_replicas), repeat=2)
    ):
        problem = f"is {replay}, where {options.label('kv_events')} listens too; give another"
        raise options.refusal("kv_events_replay", problem)
    settings.record("kv_events_replay", replay or False, reason)
    return endpoint, replay


def endpoint_of(endpoint: str, index: int) -> str:
    """Return the endpoint of replica `index`, given the first replica's `endpoint`; "" if that is ""."""
    if not endpoint or index == 0 or _is_free_port(endpoint):
        return endpoint
    if endpoint.startswith("ipc:"):
        return f"{endpoint}.{index}"
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + index}"


def check_ports(options: Options, engine: EngineConfig, server: ServerConfig) -> None:
    """Raise ConfigError if KV events of a replica, or their replay, would use the port of the HTTP server."""
    http = f"tcp://{f'[{server.host}]' if ':' in server.host else server.host}:{server.port}"
    for name in ("kv_events", "kv_events_replay"):
        if _clash(getattr(engine.cache, name), http):
            where = f"is {getattr(engine.cache, name)}, where {options.label('port')} listens too"
            raise options.refusal(name, f"{where}; give another")


def _clash(one: str, other: str) -> bool:
    """Return whether two endpoints collide: equal paths, or equal ports of equal addresses or of any address."""
    if one == other:
        return not _is_free_port(one)
    (address, port), (other_address, other_port) = _parts(one), _parts(other)
    return port == other_port != 0 and (address == other_address or "*" in (address, other_address))


def _parts(endpoint: str) -> tuple[str, int]:
    """Return address and port of a TCP endpoint: `*` is any address; port 0 is any free port, or not TCP."""
    if not endpoint.startswith("tcp:") or _is_free_port(endpoint):
        return "", 0
    address, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    address = address.strip("[]").lower()
    return {"0.0.0.0": "*", "::": "*", "localhost": "127.0.0.1"}.get(address, address), int(port)


def _is_free_port(endpoint: str) -> bool:
    """Return whether `endpoint` uses any free port."""
    return endpoint.startswith("tcp:") and endpoint.rpartition(":")[2] in ("*", "0")


def _beside(endpoint: str, num_replicas: int) -> str:
    """Return the endpoint of replays for events at `endpoint`, or "" if there are not enough ports."""
    address, _, port = endpoint.rpartition(":")
    if endpoint.startswith("ipc:"):
        return endpoint + ".replay"
    if _is_free_port(endpoint):
        return endpoint
    return "" if int(port) + 2 * num_replicas - 1 > MAX_PORT else f"{address}:{int(port) + num_replicas}"
