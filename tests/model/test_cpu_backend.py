"""What the CPU backend prepares: pages that cost nothing until used, a warm-up that leaves no trace, a fingerprint."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from pypto_serving.backend.cpu import CpuBackend
from pypto_serving.errors import ConfigError, ModelError
from pypto_serving.model.attention import KVArena, product
from pypto_serving.model.checkpoint import SINGLE_FILE
from pypto_serving.model.registry import Serving, load_spec
from pypto_serving.types.kv import FullSpec, KVTensorSpec
from pypto_serving.types.tier import TierConfig
from tests.configs import change_config
from tests.model.conftest import MakeCheckpoint
from tests.model.cpu_backend import config_for, prepare, resident_bytes
from tests.model.sequences import Sequences, compute


def test_pages_cost_nothing_until_they_are_written() -> None:
    keys = KVTensorSpec(name="k", layers=tuple(range(8)), dtype="bfloat16", row_shape=(8, 128))
    group = FullSpec(name="kv", tensors=(keys, msgspec.structs.replace(keys, name="v")), block_size=16)
    before = resident_bytes()
    arena = KVArena(group, 16384, torch.bfloat16)
    assert arena.pages.numel() * 2 == 16385 * group.block_bytes > 8 << 30
    assert resident_bytes() - before < 64 << 20
    assert not arena.pages[16384].any()


def test_the_warm_up_writes_to_the_null_block_alone(checkpoint: MakeCheckpoint) -> None:
    program = prepare(config_for(checkpoint()))
    assert program.model.arena.pages[0].any()
    assert not program.model.arena.pages[1:].any()


def test_the_program_says_what_it_is(checkpoint: MakeCheckpoint) -> None:
    config = config_for(checkpoint())
    program = prepare(config)
    assert (program.groups, program.num_blocks, program.limits) == (config.cache.groups, (40,), config.limits)


def test_progress_ends_with_everything_done(checkpoint: MakeCheckpoint) -> None:
    seen: list[tuple[str, int, int]] = []
    CpuBackend(config_for(checkpoint())).prepare(lambda *state: seen.append(state))
    assert seen[0][:2] == ("weights", 0)
    assert seen[-1][0] == "warm-up" and seen[-1][1] == seen[-1][2]
    assert [state for state in seen if state[0] == "weights"][-1][1] == seen[0][2] > 0


def test_the_fingerprint_names_what_pages_depend_on(checkpoint: MakeCheckpoint) -> None:
    path = checkpoint()
    group = load_spec(path, Serving(block_size=64)).kv_groups
    configs = [
        config_for(path),
        config_for(path, dtype="bfloat16"),
        config_for(path, groups=group),
        config_for(checkpoint(seed=1)),
    ]
    prints = {prepare(config).fingerprint for config in configs}
    assert len(prints) == len(configs)
    assert prepare(config_for(path, num_blocks=(50,))).fingerprint in prints
    assert all(len(fingerprint) == 16 for fingerprint in prints)


def test_every_byte_of_the_weights_counts_where_others_read_kv(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """A byte that no page sampled before: a disk or remote tier would serve the KV of other weights."""
    copy, changed = (shutil.copytree(checkpoint(), tmp_path / name) for name in ("copy", "changed"))
    with (changed / SINGLE_FILE).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    disk = TierConfig(tier="disk", size_bytes=1 << 20, num_slots=(1,), place="unused")
    for shared in ({"tiers": (disk,)}, {"kv_events": "tcp://127.0.0.1:5557"}):
        first, same, other = (
            prepare(change_config(config_for(path), **shared)).fingerprint for path in (checkpoint(), copy, changed)
        )
        assert first == same != other


def test_kv_that_stays_in_the_replica_costs_no_read(checkpoint: MakeCheckpoint) -> None:
    seen: list[str] = []
    host = TierConfig(tier="host", size_bytes=1 << 20, num_slots=(1,))
    for tiers in ((), (host,)):
        CpuBackend(config_for(checkpoint(), tiers=tiers)).prepare(lambda phase, *_: seen.append(phase))
    assert "digests" not in seen


def test_weights_that_change_while_they_are_loaded_are_refused(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """The fingerprint would belong to other weights."""
    copy = shutil.copytree(checkpoint(), tmp_path / "copy")
    with pytest.raises(ModelError, match="was changed while it was loaded"):
        CpuBackend(config_for(copy)).prepare(lambda *_: os.utime(copy / SINGLE_FILE, (0, 0)))


def test_other_kv_groups_are_refused(checkpoint: MakeCheckpoint) -> None:
    group = load_spec(checkpoint(), Serving("bfloat16")).kv_groups
    with pytest.raises(ConfigError, match="KV groups"):
        prepare(config_for(checkpoint(), groups=group))


def test_a_missing_checkpoint_is_a_model_error(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        prepare(config_for(checkpoint(), model=str(tmp_path)))


def test_steps_without_logits_and_without_tokens(checkpoint: MakeCheckpoint) -> None:
    program = prepare(config_for(checkpoint()))
    (sequences := Sequences(program)).step([(sequences.add(np.arange(40)), 40)])
    inputs = sequences.last_inputs
    unsampled = msgspec.structs.replace(inputs, logits_rows=inputs.logits_rows[:0])
    assert compute(program, unsampled).shape == (0, 320)
    nothing = {name: getattr(inputs, name)[:0] for name in ("token_ids", "positions", "context_lens", "logits_rows")}
    empty = msgspec.structs.replace(inputs, **nothing, query_start=inputs.query_start[:1])
    assert compute(program, empty).shape == (0, 320)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_float32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(3, 8, 128, generator=generator).to(dtype)
    b = torch.randn(3, 128, 256, generator=generator).to(dtype)
    wanted = a.double() @ b.double()
    assert (product(a, b) - wanted).abs().max() < 1e-5 * wanted.abs().max()
