"""Loading DeepSeek V4 checkpoints, and the program's pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pypto_serving.errors import ModelError
from pypto_serving.model.deepseek_v4.layers import apply_rope
from pypto_serving.model.registry import load_spec
from tests.model.conftest import MakeCheckpoint
from tests.model.sequences import Sequences, load_program

KIND = "deepseek_v4_fast"


def changed(source: Path, target: Path, drop: str = "", **add: torch.Tensor) -> Path:
    """A copy of a checkpoint without one tensor and with others; `__` stands for a dot."""
    tensors = load_file(source / "model.safetensors")
    tensors.pop(drop, None)
    tensors |= {name.replace("__", "."): tensor for name, tensor in add.items()}
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text((source / "config.json").read_text())
    return target


def logits(path: Path, dtype: str = "float32") -> Any:
    sequences = Sequences(load_program(path, dtype, num_blocks=40, max_model_len=128, threads=1))
    sequence = sequences.add(np.arange(40))
    sequences.run(sequence, [40])
    return sequence.logits[39]


def test_draft_layers_are_left_alone(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    path = changed(checkpoint(KIND), tmp_path, mtp__0__norm__weight=torch.ones(64), mtp__2__odd=torch.ones(1))
    assert np.array_equal(logits(path), logits(checkpoint(KIND)))


@pytest.mark.parametrize(
    ("drop", "add", "words"),
    [
        ("layers.1.attn.indexer.wq_b.weight", {}, ["layers.1.attn.indexer.wq_b.weight", "missing"]),
        ("layers.0.ffn.gate.tid2eid", {}, ["layers.0.ffn.gate.tid2eid", "missing"]),
        ("", {"layers__0__odd": torch.ones(1)}, ["layers.0.odd", "not part of this model"]),
        ("", {"layers__0__attn__attn_sink": torch.ones(5)}, ["attn_sink", "[5]", "[4]"]),
        ("", {"layers__0__ffn__gate__tid2eid": torch.ones(320, 2)}, ["tid2eid", "F32", "I64"]),
        ("", {"norm__weight": torch.ones(64, dtype=torch.int64)}, ["norm.weight", "I64", "F32, BF16, F16"]),
    ],
)
def test_an_odd_tensor_is_named(
    checkpoint: MakeCheckpoint, tmp_path: Path, drop: str, add: dict[str, torch.Tensor], words: list[str]
) -> None:
    with pytest.raises(ModelError) as caught:
        load_program(changed(checkpoint(KIND), tmp_path, drop, **add), num_blocks=8, max_model_len=64)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_weights_in_bfloat16_are_served_in_either_dtype(checkpoint: MakeCheckpoint) -> None:
    path = checkpoint(KIND, dtype="bfloat16")
    assert load_spec(path).dtype == "bfloat16"
    exact = logits(path)
    assert np.abs(logits(path, "bfloat16") - exact).mean() < 0.2 * np.abs(exact).mean()


def test_pages_cost_nothing_and_the_warm_up_writes_to_null_blocks_alone(checkpoint: MakeCheckpoint) -> None:
    program = load_program(checkpoint(KIND), num_blocks=500_000, max_model_len=128, threads=1)
    assert [len(arena) for arena in program.memory.arenas] == [500_000] * 6
    for arena, group in zip(program.memory.arenas, program.groups, strict=True):
        assert arena.shape[1] == group.block_bytes
        assert arena[0].any() and not arena[1:2000].any() and not arena[-1].any()


def test_pairs_of_neighbours_turn() -> None:
    x = torch.arange(6.0).view(1, 1, 6)
    cos, sin = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    assert apply_rope(x, cos, sin).flatten().tolist() == [0.0, 1.0, -3.0, 2.0, 4.0, 5.0]
    assert torch.equal(apply_rope(apply_rope(x, cos, sin), cos, -sin), x)
