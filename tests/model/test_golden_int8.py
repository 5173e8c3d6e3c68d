"""Logits on int8 weights: no further from W8A8 in float32 than the same in bfloat16 by transformers is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pypto_serving.kernels import runnable
from tests.checkpoints import make_checkpoint
from tests.compressed import compress, reference
from tests.model.golden_chunks import CHUNKS, ENDS, ROOM, random_tokens
from tests.model.sequences import Array, Sequences, load_program
from tests.model.variants import WIDE
from tests.needs import needs_kernels

pytestmark = [
    pytest.mark.golden,
    needs_kernels,
]

IGNORED = ("lm_head", "re:.*mlp.gate$")


def our_logits(path: Path, kernels: str, seed: int) -> Array:
    """Logits [ends, vocab] of a program."""
    program = load_program(path, "bfloat16", threads=1, kernels=kernels)
    sequence = (sequences := Sequences(program)).add(random_tokens(seed))
    sequences.run(sequence, CHUNKS)
    return np.stack([sequence.logits[end] for end in ENDS])


def reference_logits(path: Path, dtype: torch.dtype, seed: int, lm_head: bool) -> Array:
    with torch.no_grad():
        logits = reference(path, dtype, lm_head)(torch.tensor(random_tokens(seed))[None]).logits[0]
    return np.asarray(logits.float().numpy())[ENDS]


def check(tmp_path: Path, kernels: str, kind: str, seeds: int, ignore: tuple[str, ...], **overrides: Any) -> None:
    """Compare mean errors over some random models."""
    errors: dict[str, list[float]] = {"ours": [], "theirs": []}
    for seed in range(seeds):
        compressed, exact = (
            compress(make_checkpoint(tmp_path / f"{kind} {seed} {name}", kind, seed=seed, **overrides), ignore, name)
            for name in (False, True)
        )
        wanted, coarse = (
            reference_logits(exact, dtype, seed, "lm_head" not in ignore) for dtype in (torch.float32, torch.bfloat16)
        )
        errors["theirs"].append(float(np.abs(coarse - wanted).mean()))
        errors["ours"].append(float(np.abs(our_logits(compressed, kernels, seed) - wanted).mean()))
    assert np.mean(errors["ours"]) < ROOM * np.mean(errors["theirs"])


@pytest.mark.thinned(1)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("kernels", runnable())
def test_every_instruction_set(tmp_path: Path, kind: str, kernels: str) -> None:
    check(tmp_path, kernels, kind, 3, IGNORED)


@pytest.mark.parametrize(
    ("ignore", "overrides"),
    [
        (IGNORED, WIDE),
        (IGNORED[1:], {"tie_word_embeddings": False, "attention_bias": True}),
        (IGNORED, {"hidden_size": 68, "intermediate_size": 48, "vocab_size": 333}),
    ],
)
def test_variants(tmp_path: Path, ignore: tuple[str, ...], overrides: dict[str, Any]) -> None:
    check(tmp_path, runnable()[0], "qwen3", 3, ignore, **overrides)
