"""Choose block sizes: those of the model, or what a backend or a remote store wants instead."""

from __future__ import annotations

import msgspec

from pypto_serving.backend.defaults import BackendDefaults
from pypto_serving.errors import ConfigError
from pypto_serving.setup.option_table import REMOTE_BLOCK_BYTES
from pypto_serving.setup.settings import Settings
from pypto_serving.types.kv import KVCacheGroupSpec
from pypto_serving.types.model import ModelSpec
from pypto_serving.util import format_size

LARGEST_BLOCK = 1024
"""Tokens of the largest block that is chosen without being asked for."""


def choose_block_size(settings: Settings, model: ModelSpec, backend: BackendDefaults) -> ModelSpec:
    """Return `model` with the KV groups to serve; warn of blocks that a remote store moves slowly."""
    if backend.traits.page_tokens:
        return _in_pages(settings, model, backend.traits.page_tokens)
    options, (group, *others) = settings.options, model.kv_groups
    own = "of the first KV group; each has its own" if model.own_blocks else "default"
    reason = settings.origin_or("block_size", own)
    if options.kv_remote and not others and group.block_bytes < REMOTE_BLOCK_BYTES and options.block_size is None:
        group, reason = _larger_block(group, options.max_model_len or model.max_position_embeddings)
        model = msgspec.structs.replace(model, kv_groups=(group,))
    elif options.kv_remote:
        _warn_of_small_blocks(settings, model)
    settings.record("block_size", group.block_size, reason)
    return model


def _in_pages(settings: Settings, model: ModelSpec, size: int) -> ModelSpec:
    """Give every group blocks of the size that the backend demands. Raises ConfigError if another was asked for."""
    if settings.options.block_size not in (None, size):
        label = settings.options.label("block_size")
        raise ConfigError(f"{label} is {settings.options.block_size}, but this backend has blocks of {size}; drop it")
    settings.record("block_size", size, settings.origin_or("block_size", "what the backend has"))
    groups = tuple(msgspec.structs.replace(group, block_size=size) for group in model.kv_groups)
    return msgspec.structs.replace(model, kv_groups=groups)


def _larger_block(group: KVCacheGroupSpec, longest: int) -> tuple[KVCacheGroupSpec, str]:
    """Double the block size until blocks are large enough, up to half of the `longest` sequence; say why."""
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
