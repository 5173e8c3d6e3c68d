"""EngineConfigs by the names of fields alone, whatever part has them."""

from __future__ import annotations

from typing import Any

import msgspec

from pypto_serving.types.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    WorkerConfig,
)
from pypto_serving.types.step import BackendLimits, BackendTraits

PARTS: dict[str, Any] = {
    "model": ModelConfig,
    "limits": BackendLimits,
    "scheduler": SchedulerConfig,
    "cache": CacheConfig,
    "parallel": ParallelConfig,
    "worker": WorkerConfig,
}
PART_OF = {field: part for part, kind in PARTS.items() for field in kind.__struct_fields__}


def make_config(traits: BackendTraits | None = None, num_drafts: int = 0, **fields: Any) -> EngineConfig:
    """A configuration of these fields; `model` is the path of the model."""
    traits = msgspec.structs.replace(traits or BackendTraits(), max_drafts=num_drafts)
    parts, whole = _in_parts({**fields, "traits": traits})
    return EngineConfig(**{part: kind(**parts.get(part, {})) for part, kind in PARTS.items()}, **whole)


def change_config(config: EngineConfig, **fields: Any) -> EngineConfig:
    """The same configuration but for these fields; `traits` keep the number of drafts that is not given."""
    if not fields.keys().isdisjoint({"traits", "num_drafts"}):
        num_drafts = fields.pop("num_drafts", config.num_drafts)
        traits = fields.pop("traits", config.limits.traits)
        fields["traits"] = msgspec.structs.replace(traits, max_drafts=num_drafts)
    parts, whole = _in_parts(fields)
    changed = {part: msgspec.structs.replace(getattr(config, part), **own) for part, own in parts.items()}
    return msgspec.structs.replace(config, **changed, **whole)


def _in_parts(fields: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """The fields of each part, and those of the whole."""
    parts: dict[str, dict[str, Any]] = {}
    whole: dict[str, Any] = {}
    for name, value in fields.items():
        own = "path" if name == "model" else name
        if own in PART_OF:
            parts.setdefault(PART_OF[own], {})[own] = value
        else:
            whole[name] = value
    return parts, whole
