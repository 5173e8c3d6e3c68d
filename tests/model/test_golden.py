"""Logits against transformers in float32, whatever the chunks, block ids and neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pypto_serving.model.registry import load_spec
from tests.checkpoints import DECODERS, random_model, with_dtype
from tests.model.conftest import MakeCheckpoint
from tests.model.sequences import Array, Sequences, load_program
from tests.model.variants import EXPERT_VARIANTS, VARIANTS

pytestmark = pytest.mark.golden

LENGTH = 300
TOLERANCE = 1e-4


def random_tokens(seed: int = 0, length: int = LENGTH) -> Array:
    return np.random.default_rng(seed).integers(0, 256, length)


def golden(tokens: Array, kind: str, **overrides: Any) -> Array:
    """Logits [t, vocab] of transformers without a cache."""
    with torch.no_grad():
        logits = random_model(kind, **overrides)(torch.tensor(np.asarray(tokens))[None]).logits[0]
    return np.asarray(logits.numpy())


def worst(logits: dict[int, Array], wanted: Array) -> float:
    """The largest difference; NaN if there is one."""
    return float(np.max([np.abs(row - wanted[position]).max() for position, row in logits.items()]))


@pytest.mark.parametrize("kind", DECODERS)
def test_prefill_chunks_and_steps(checkpoint: MakeCheckpoint, kind: str) -> None:
    tokens = random_tokens()
    wanted = golden(tokens, kind)
    sequences = Sequences(load_program(checkpoint(kind), threads=1))
    steps = [1] * LENGTH if kind == "qwen3" else [LENGTH - 30, *[1] * 30]
    for chunks in ([LENGTH], steps, [128, 172], [37] * 9, [5, 290, *[1] * 5]):
        sequence = sequences.add(tokens)
        sequences.run(sequence, chunks)
        assert worst(sequence.logits, wanted) < TOLERANCE
        sequences.free(sequence)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_interleaved_requests(checkpoint: MakeCheckpoint, kind: str) -> None:
    rng = np.random.default_rng(1)
    sequences = Sequences(load_program(checkpoint(kind), threads=1))
    work = [sequences.add(random_tokens(seed, LENGTH + 10 * seed)) for seed in range(4)]
    while left := [s for s in work if s.computed < len(s.tokens)]:
        chosen = [s for s in left if rng.random() < 0.7] or left[:1]
        sequences.step([(s, int(min(len(s.tokens) - s.computed, rng.integers(1, 60)))) for s in chosen])
    for seed, sequence in enumerate(work):
        assert worst(sequence.logits, golden(random_tokens(seed, LENGTH + 10 * seed), kind)) < TOLERANCE


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS.keys())
def test_variants(checkpoint: MakeCheckpoint, overrides: dict[str, Any]) -> None:
    tokens = random_tokens()
    sequences = Sequences(load_program(checkpoint("qwen3", **overrides), threads=1))
    sequence = sequences.add(tokens)
    sequences.run(sequence, [100, 37, 128, *[1] * 35])
    assert worst(sequence.logits, golden(tokens, "qwen3", **overrides)) < TOLERANCE


@pytest.mark.parametrize("theta", [5e5, 123456.0])
def test_a_long_sequence(checkpoint: MakeCheckpoint, theta: float) -> None:
    """Where a last bit of a frequency shows."""
    overrides = {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    tokens = random_tokens(1, 2000)
    program = load_program(checkpoint("qwen3", **overrides), threads=1, num_blocks=200, max_model_len=2048)
    sequence = (sequences := Sequences(program)).add(tokens)
    sequences.run(sequence, [700, *[100] * 12, 90, *[1] * 10])
    assert worst(sequence.logits, golden(tokens, "qwen3", **overrides)) < TOLERANCE


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False, "head_dim": 16}),
        ("mistral", {"hidden_act": "swish", "num_key_value_heads": 1}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
        ("qwen2", {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False}),
        ("mistral", {"sliding_window": 512, "head_dim": 48}),
        ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3}),
        ("ministral3", {"tie_word_embeddings": True, "head_dim": 48, "num_key_value_heads": 4}),
        ("smollm3", {"no_rope_layers": [0, 0, 1], "attention_bias": True, "mlp_bias": True}),
        ("seed_oss", {"attention_out_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("seed_oss", {"attention_bias": False}),
        ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}}),
        ("phi3", {"original_max_position_embeddings": 2048, "tie_word_embeddings": True, "num_key_value_heads": 2}),
    ],
)
def test_switches_of_families(checkpoint: MakeCheckpoint, kind: str, overrides: dict[str, Any]) -> None:
    tokens = random_tokens()
    sequence = (sequences := Sequences(load_program(checkpoint(kind, **overrides), threads=1))).add(tokens)
    sequences.run(sequence, [100, 37, 148, *[1] * 15])
    assert worst(sequence.logits, golden(tokens, kind, **overrides)) < TOLERANCE


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("mistral", {}),
        ("mixtral", {}),
        ("phi3", {}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 0}),
    ],
)
def test_a_window_limits_the_length(checkpoint: MakeCheckpoint, kind: str, overrides: dict[str, Any]) -> None:
    """In it answers are exact to the last token; behind it, those of transformers are no longer of full attention."""
    tokens, window = random_tokens(length=200), 100
    folder = checkpoint(kind, sliding_window=window, **overrides)
    assert (load_spec(folder).max_position_embeddings, load_spec(folder).window) == (window, window)
    sequence = (sequences := Sequences(load_program(folder, threads=1))).add(tokens)
    sequences.run(sequence, [60, 40])
    wanted = golden(tokens, kind, sliding_window=window, **overrides)
    assert worst(sequence.logits, wanted) < TOLERANCE and len(sequence.logits) >= 2
    sequences.run(sequence, [100])
    assert worst(sequence.logits, wanted) > 100 * TOLERANCE
    full = checkpoint(kind, sliding_window=None)
    assert (load_spec(full).max_position_embeddings, load_spec(full).window) == (4096, 0)


@pytest.mark.parametrize("overrides", EXPERT_VARIANTS)
def test_expert_variants(checkpoint: MakeCheckpoint, overrides: dict[str, Any]) -> None:
    tokens = random_tokens()
    sequences = Sequences(load_program(checkpoint("qwen3_moe", **overrides), threads=1))
    sequence = sequences.add(tokens)
    sequences.run(sequence, [LENGTH])
    assert worst(sequence.logits, golden(tokens, "qwen3_moe", **overrides)) < TOLERANCE


def test_dynamic_scaling_is_fixed_by_the_longest_sequence(checkpoint: MakeCheckpoint) -> None:
    """Equal to transformers at the length that the model is served with, and the same at any other."""
    overrides = {
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        "max_position_embeddings": 64,
    }
    tokens = random_tokens(length=160)
    sequences = Sequences(load_program(checkpoint("qwen3", **overrides), max_model_len=160, threads=1))
    sequence = sequences.add(tokens)
    sequences.run(sequence, [1, 31, 128])
    assert worst(sequence.logits, golden(tokens, "qwen3", **overrides)) < TOLERANCE


@pytest.mark.parametrize("block_size", [1, 24, 64, 512])
def test_block_sizes(checkpoint: MakeCheckpoint, block_size: int) -> None:
    tokens = random_tokens()
    blocks = 3 + 2 * LENGTH // block_size
    sequences = Sequences(load_program(checkpoint(), threads=1, num_blocks=blocks, block_size=block_size))
    sequence = sequences.add(tokens)
    sequences.run(sequence, [70, 1, 1, 200, 28])
    assert worst(sequence.logits, golden(tokens, "qwen3")) < TOLERANCE


def test_bfloat16_is_as_close_as_transformers_in_bfloat16(checkpoint: MakeCheckpoint) -> None:
    tokens = random_tokens()
    wanted = golden(tokens, "qwen3")
    with torch.no_grad():
        theirs = with_dtype(random_model("qwen3"), torch.bfloat16)(torch.tensor(tokens)[None]).logits[0].float().numpy()
    sequences = Sequences(load_program(checkpoint(), "bfloat16", threads=1))
    sequence = sequences.add(tokens)
    sequences.run(sequence, [1] * LENGTH)
    ours = np.stack([sequence.logits[i] for i in range(LENGTH)])
    assert np.abs(ours - wanted).mean() < 1.1 * np.abs(theirs - wanted).mean()
