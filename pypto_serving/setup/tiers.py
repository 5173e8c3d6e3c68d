"""Tiers below the device: host memory, a disk and a remote store, with the blocks that each one keeps."""

from __future__ import annotations

from pypto_serving.backend.defaults import BackendDefaults
from pypto_serving.errors import ConfigError
from pypto_serving.setup.host import DiskFacts, HostFacts
from pypto_serving.setup.kv_shares import tier_slots
from pypto_serving.setup.settings import Settings
from pypto_serving.types.model import ModelSpec
from pypto_serving.types.tier import INDEX_BYTES, Tier, TierConfig
from pypto_serving.util import format_size, install_extra

MAX_SLOTS = 1 << 22
"""Blocks of one group in one tier; a disk keeps INDEX_BYTES in memory for each."""
REMOTE_BYTES, REMOTE_BLOCKS = 1 << 40, 1 << 16
"""Bounds of what the engine core remembers of a remote store, which has a size of its own."""


def choose_tiers(
    settings: Settings, model: ModelSpec, host: HostFacts, backend: BackendDefaults, host_bytes: int
) -> tuple[TierConfig, ...]:
    """Choose the tiers, from fast to slow, with `host_bytes` of host memory; raise ConfigError for impossible ones."""
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
            raise ConfigError(
                f"{options.label('kv_remote')} is {options.kv_remote}, which needs Mooncake, and Mooncake is not "
                f"installed; drop it, or {install_extra('mooncake')}"
            )
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
    off = "off, because the device's memory is host memory; see kv-memory" if backend.in_host_memory else "default: off"
    reason = settings.origin_or("kv_host_memory", off)
    settings.record("kv_host_memory", format_size(host_bytes) if host_bytes else False, reason)
    settings.pick_fixed("kv_disk", "default: off")
    settings.pick_fixed("kv_remote", "default: off")
    disk_bytes: int = settings.options.kv_disk_size or settings.defaults["kv_disk_size"]
    settings.record("kv_disk_size", format_size(disk_bytes), settings.origin_or("kv_disk_size", "default"))
    return disk_bytes


def _tier(
    settings: Settings, model: ModelSpec, tier: Tier, option: str, size_bytes: int, place: str = ""
) -> TierConfig:
    """Share `size_bytes` out among the groups; raise ConfigError naming `option` if a block of history does not fit."""
    most = REMOTE_BLOCKS if tier == "remote" else MAX_SLOTS
    slots = tuple(min(count, most) for count in tier_slots(model.kv_groups, size_bytes))
    for group, count in zip(model.kv_groups, slots, strict=True):
        if group.keeps_history and count == 0:
            raise ConfigError(
                f"{settings.options.label(option)} is {format_size(size_bytes)}, too little for a block of KV group "
                f"{group.name}, which has {format_size(group.block_bytes)}; give more"
            )
    return TierConfig(tier=tier, size_bytes=size_bytes, num_slots=slots, place=place)


def _check_disk(settings: Settings, model: ModelSpec, disk: DiskFacts, tier: TierConfig) -> None:
    """Raise ConfigError for a folder that can neither be written nor has blocks; warn of a disk that is too small.

    Blocks that are there already are part of the tier, so a used folder is bounded by the disk, not by its free space.
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
