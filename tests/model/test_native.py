"""What the CPU backend prepares on the kernels: pages that cost nothing until used, odd steps, a fingerprint."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pypto_serving.backend.cpu import CpuBackend
from pypto_serving.errors import ConfigError
from pypto_serving.kernels import runnable
from pypto_serving.model.registry import Serving, load_spec, read_config
from tests.model.conftest import MakeCheckpoint
from tests.model.cpu_backend import config_for, prepare, resident_bytes
from tests.model.sequences import Sequences, compute
from tests.needs import needs_kernels

pytestmark = needs_kernels

ROOT = Path(__file__).resolve().parents[2]


def native_config(path: Any, kernels: str = "", **changes: Any) -> Any:
    return config_for(path, "bfloat16", kernels=kernels or runnable()[0], **changes)


def test_pages_cost_nothing_until_they_are_written(checkpoint: MakeCheckpoint) -> None:
    config = native_config(checkpoint(), num_blocks=(200_000,))
    before = resident_bytes()
    program = prepare(config)
    assert program.model.pages.nbytes > 2 << 30
    assert resident_bytes() - before < 64 << 20


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_steps_without_logits_and_without_tokens(checkpoint: MakeCheckpoint, kind: str) -> None:
    program = prepare(native_config(checkpoint(kind)))
    (sequences := Sequences(program)).step([(sequences.add(np.arange(40)), 40)])
    inputs = sequences.last_inputs
    unsampled = msgspec.structs.replace(inputs, logits_rows=inputs.logits_rows[:0])
    assert compute(program, unsampled).shape == (0, 320)
    nothing = {name: getattr(inputs, name)[:0] for name in ("token_ids", "positions", "context_lens", "logits_rows")}
    empty = msgspec.structs.replace(inputs, **nothing, query_start=inputs.query_start[:1])
    assert compute(program, empty).shape == (0, 320)


def test_the_largest_step(checkpoint: MakeCheckpoint) -> None:
    """As many tokens as a step may have, and as many rows."""
    config = native_config(checkpoint("qwen3_moe"), max_num_batched_tokens=200, max_num_seqs=50, num_blocks=(300,))
    sequences = Sequences(prepare(config))
    work = [sequences.add(np.arange(5 + i) % 250) for i in range(50)]
    sequences.step([(sequence, 4) for sequence in work])
    together = [sequence.logits[3] for sequence in work]
    assert all(np.array_equal(row, together[0]) for row in together)


def test_the_fingerprint_names_the_kernels(checkpoint: MakeCheckpoint) -> None:
    path = checkpoint()
    blocks = load_spec(path, Serving("bfloat16", 64)).kv_groups
    configs = [config_for(path, "bfloat16"), *(native_config(path, kernels) for kernels in runnable())]
    configs += [native_config(path, groups=blocks), native_config(checkpoint(seed=1))]
    assert len({prepare(config).fingerprint for config in configs}) == len(configs)
    threads = [prepare(native_config(path, num_threads=n)).fingerprint for n in (1, 2)]
    assert threads[0] == threads[1]


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_progress_ends_with_everything_done(checkpoint: MakeCheckpoint, kind: str) -> None:
    seen: list[tuple[str, int, int]] = []
    CpuBackend(native_config(checkpoint(kind))).prepare(lambda *state: seen.append(state))
    assert seen[0][1] == 0 < seen[0][2]
    assert seen[-1][1] == seen[-1][2] == seen[0][2]
    assert seen == sorted(seen)


def test_kernels_that_this_machine_does_not_run(checkpoint: MakeCheckpoint) -> None:
    with pytest.raises(ConfigError, match="no kernels for sve"):
        prepare(native_config(checkpoint(), "sve"))


@pytest.mark.parametrize(
    ("changes", "block_size", "dtype", "reason"),
    [
        ({}, 32, "bfloat16", ""),
        ({}, 32, "float32", "bfloat16 only, not float32"),
        ({}, 24, "bfloat16", "multiple of 32 tokens, not 24"),
        ({"attention": {"head_dim": 48}}, 32, "bfloat16", "head_dim of 32, 64, ... 256, not 48"),
        ({"attention": {"head_dim": 288}}, 32, "bfloat16", "not 288"),
        ({"attention": {"num_heads": 97, "num_kv_heads": 1}}, 32, "bfloat16", "at most 96 queries"),
        ({"hidden_size": 63}, 32, "bfloat16", "even hidden_size"),
        ({"mlp": {"width": 100}}, 32, "bfloat16", "multiples of 16, not [100]"),
        ({"mlp": {"bias": True}}, 32, "bfloat16", ""),
    ],
)
def test_why_a_model_needs_torch(
    checkpoint: MakeCheckpoint, changes: dict[str, Any], block_size: int, dtype: str, reason: str
) -> None:
    found = read_config(checkpoint())
    model = found.model
    own, parts = dict(changes), {}
    for part in {"attention", "mlp"} & changes.keys():
        parts[part] = dataclasses.replace(getattr(model.layers[0], part), **own.pop(part))
    layers = tuple(dataclasses.replace(layer, **parts) for layer in model.layers)
    changed = dataclasses.replace(model, layers=layers, **own)
    spec = found.family.spec(changed, Serving(dtype, block_size), {})
    assert (reason in spec.needs_torch) if reason else not spec.needs_torch


_LOAD = """
import sys
from pathlib import Path
from tests.model.sequences import load_program

def kib(field):
    return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0])

before = kib("VmRSS")
program = load_program(Path(sys.argv[1]), "bfloat16", 8, 128, kernels=sys.argv[2])
print((kib("VmHWM") - before) * 1024)
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_loading_holds_no_second_copy(checkpoint: MakeCheckpoint, dtype: str) -> None:
    """The most memory that loading takes is that of the packed weights, not of the checkpoint besides."""
    path = checkpoint("qwen3", dtype=dtype, hidden_size=1024, intermediate_size=6144, num_hidden_layers=6)
    served = sum(file.stat().st_size for file in path.glob("*.safetensors")) // (1 if dtype == "bfloat16" else 2)
    assert served > 200e6
    command = [sys.executable, "-c", _LOAD, path, runnable()[0]]
    taken = int(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)
    assert served * 0.9 < taken < served * 1.3
