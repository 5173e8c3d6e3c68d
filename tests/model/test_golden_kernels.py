"""Logits of the kernels: no further from transformers in float32, on weights of bfloat16, than torch in bfloat16 is."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch

from pypto_serving.kernels import runnable
from tests.checkpoints import DECODERS, random_model, with_dtype
from tests.model.conftest import MakeCheckpoint
from tests.model.golden_chunks import CHUNKS, ENDS, LENGTH, ROOM, random_tokens
from tests.model.sequences import Array, Sequences, load_program
from tests.model.variants import EXPERT_VARIANTS, VARIANTS, WIDE
from tests.needs import needs_kernels

pytestmark = [
    pytest.mark.golden,
    needs_kernels,
]


ROOM_OF_ONE = 1.3
"""The error of a single model may be larger by chance."""
SEEDS = pytest.mark.parametrize("seeds", [1, pytest.param(3, marks=pytest.mark.soak)])


@lru_cache
def transformers_logits(kind: str, seed: int, overrides: str) -> tuple[Array, Array]:
    """Logits [ends, vocab] of transformers on weights of bfloat16: in float32 and in bfloat16."""
    ids = torch.tensor(random_tokens(seed))[None]
    model = random_model(kind, seed, **json.loads(overrides))
    with torch.no_grad():
        coarse = with_dtype(model, torch.bfloat16)(ids).logits[0].float().numpy()
        exact = with_dtype(model, torch.float32)(ids).logits[0].numpy()
    return exact[ENDS], coarse[ENDS]


@lru_cache
def our_logits(make: MakeCheckpoint, kernels: str, kind: str, seed: int, overrides: str) -> Array:
    """Logits [ends, vocab] of a program in bfloat16."""
    program = load_program(make(kind, seed=seed, **json.loads(overrides)), "bfloat16", threads=1, kernels=kernels)
    sequence = (sequences := Sequences(program)).add(random_tokens(seed))
    sequences.run(sequence, CHUNKS)
    return np.stack([sequence.logits[end] for end in ENDS])


def check(make: MakeCheckpoint, kernels: str, kind: str, seeds: int, **overrides: Any) -> None:
    """Compare mean errors over some random models."""
    errors: dict[str, list[float]] = {"kernels": [], "torch": [], "transformers": []}
    changes = json.dumps(overrides)
    for seed in range(seeds):
        exact, coarse = transformers_logits(kind, seed, changes)
        found = {name: our_logits(make, name, kind, seed, changes) for name in (kernels, "torch")}
        for name, logits in zip(errors, (found[kernels], found["torch"], coarse), strict=True):
            errors[name].append(float(np.abs(logits - exact).mean()))
    room = ROOM if seeds > 1 else ROOM_OF_ONE
    assert np.mean(errors["kernels"]) < room * np.mean(errors["torch"])
    assert np.mean(errors["kernels"]) < room * np.mean(errors["transformers"])


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("kernels", runnable())
def test_every_instruction_set(checkpoint: MakeCheckpoint, kind: str, kernels: str) -> None:
    check(checkpoint, kernels, kind, seeds=3)


@pytest.mark.parametrize("kind", [kind for kind in DECODERS if not kind.startswith("qwen3")])
def test_every_family(checkpoint: MakeCheckpoint, kind: str) -> None:
    check(checkpoint, runnable()[0], kind, seeds=2)


def test_a_wide_model(checkpoint: MakeCheckpoint) -> None:
    check(checkpoint, runnable()[0], "qwen3", seeds=1, **WIDE)


@pytest.mark.parametrize(
    "overrides",
    [
        *(pytest.param(each, marks=pytest.mark.soak) for each in VARIANTS.values() if "rope_parameters" in each),
        *(VARIANTS[name] for name in ("untied-biased", "three-queries-per-key")),
        {"num_key_value_heads": 4, "head_dim": 64},
        {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 128},
        {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256},
        {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 96},
        {"hidden_size": 70, "intermediate_size": 48, "vocab_size": 333},
    ],
    ids=",".join,
)
@SEEDS
def test_variants(checkpoint: MakeCheckpoint, overrides: dict[str, Any], seeds: int) -> None:
    check(checkpoint, runnable()[0], "qwen3", seeds, **overrides)


@pytest.mark.parametrize("overrides", [*EXPERT_VARIANTS, {"num_experts": 5, "num_experts_per_tok": 5}])
@SEEDS
def test_expert_variants(checkpoint: MakeCheckpoint, overrides: dict[str, Any], seeds: int) -> None:
    check(checkpoint, runnable()[0], "qwen3_moe", seeds, **overrides)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_stored_types(checkpoint: MakeCheckpoint, dtype: str) -> None:
    """A checkpoint of float16 or bfloat16 is served as one of float32 that holds the same values."""
    tokens = random_tokens(0)
    stored = checkpoint("qwen3_moe", dtype=dtype)
    widened = checkpoint("qwen3_moe", through=dtype)
    found = []
    for path in (stored, widened):
        sequence = (sequences := Sequences(load_program(path, "bfloat16", threads=1, kernels=runnable()[0]))).add(
            tokens
        )
        sequences.run(sequence, [LENGTH])
        found.append(sequence.logits[LENGTH - 1])
    assert np.array_equal(*found)
