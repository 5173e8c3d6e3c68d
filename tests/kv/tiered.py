"""Replicas with tiers below the device, and prompts that share prefixes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from pypto_serving.model.null_models import deepseek_v4_groups, plain_groups
from pypto_serving.types.kv import CompressedSpec, FullSpec, KVCacheGroupSpec, KVTensorSpec, StateSpec, WindowSpec
from pypto_serving.types.tier import TIERS, TierConfig
from tests.simulation import Simulation, in_pages, null_config


def small_groups() -> tuple[KVCacheGroupSpec, ...]:
    """Every kind of group, in blocks of a few tokens; keys of one are known late."""

    def row(ratio: int = 1, folded_from: str = "") -> tuple[KVTensorSpec, ...]:
        tensor = KVTensorSpec(
            name="t", layers=(0,), dtype="float32", row_shape=(8,), ratio=ratio, folded_from=folded_from
        )
        return (tensor,)

    return (
        FullSpec(name="full", block_size=8, tensors=row()),
        WindowSpec(name="window", block_size=8, window=12, tensors=row(), key_lookahead=5),
        CompressedSpec(name="cmp", block_size=8, tensors=row(4, "state")),
        StateSpec(name="state", block_size=4, period=4, overlap=4, tensors=row()),
    )


GROUP_SETS: dict[str, tuple[tuple[KVCacheGroupSpec, ...], tuple[int, ...], tuple[int, ...]]] = {
    "plain": (plain_groups(16), (24,), (48,)),
    "all kinds": (small_groups(), (48, 40, 48, 70), (60, 20, 60, 20)),
    "deepseek_v4": (deepseek_v4_groups(), (9, 6, 6, 60, 70, 70), (12, 12, 12, 1, 12, 12)),
    "deepseek_v4 in pages": (in_pages(deepseek_v4_groups(), 128), (9, 6, 6, 10, 10, 10), (12, 12, 12, 1, 12, 12)),
}


def tiered(kind: str, disk: Path | None = None, host: bool = True, **changes: Any) -> Simulation:
    """A replica with a host tier, and one on disk below it; a disk holds four times as much."""
    groups, num_blocks, num_slots = GROUP_SETS[kind]
    tiers = [TierConfig(tier="host", size_bytes=0, num_slots=num_slots)] if host else []
    if disk is not None:
        slots = tuple(4 * count for count in num_slots)
        tiers.append(TierConfig(tier="disk", size_bytes=1 << 30, num_slots=slots, place=str(disk)))
    return Simulation(null_config(groups, num_blocks, tiers=tuple(tiers), max_num_seqs=5, **changes))


def hits(simulation: Simulation) -> dict[str, int]:
    """Cached tokens by tier, over all requests."""
    totals = [0] * len(TIERS)
    for output in simulation.last.values():
        for i, count in enumerate(output.cached_by_tier):
            totals[i] += count
    return dict(zip(TIERS, totals, strict=True))


def prompt(rng: random.Random, families: int = 4, longest: int = 200) -> list[int]:
    """A prompt that shares a prefix of random length with others of its family."""
    family = random.Random(rng.randrange(families))
    shared = [family.randrange(1000) for _ in range(longest)][: rng.randrange(0, longest)]
    return [*shared, *(rng.randrange(1000) for _ in range(rng.randrange(1, 40)))]
