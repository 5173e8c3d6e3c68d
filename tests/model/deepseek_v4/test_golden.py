"""Logits against transformers in float32, whatever the chunks, block ids, neighbours and resumed prefixes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoints import random_model, with_dtype
from tests.deepseek_v4 import HEAVY, SLIDING, SPARSE
from tests.model.conftest import MakeCheckpoint
from tests.model.sequences import Array, Sequence_, Sequences, load_program

pytestmark = pytest.mark.golden

TOLERANCE = 1e-4
LENGTH, LONG = 90, 2048
VARIANTS: dict[str, dict[str, Any]] = {
    "all-csa": {"layer_types": [SPARSE] * 4},
    "all-hca": {"layer_types": [HEAVY] * 4},
    "all-swa": {"layer_types": [SLIDING] * 4},
    "as-pro": {"layer_types": [HEAVY, HEAVY, SPARSE, HEAVY]},
    "hash-only": {"num_hash_layers": 4},
    "scores-only": {"num_hash_layers": 0},
    "other-ratios": {"compress_rates": {SPARSE: 6, HEAVY: 24}, "sliding_window": 20},
    "three-streams": {"hc_mult": 3, "hc_sinkhorn_iters": 3},
    "tight-clamp": {"swiglu_limit": 0.5},
    "no-yarn": {"rope_scaling": None},
}


def random_tokens(seed: int = 0, length: int = LENGTH) -> Array:
    return np.random.default_rng(seed).integers(0, 256, length)


def golden(tokens: Array, kind: str = "deepseek_v4_fast", **overrides: Any) -> Array:
    """Logits [t, vocab] of transformers without a cache."""
    with torch.no_grad():
        logits = random_model(kind, **overrides)(torch.tensor(np.asarray(tokens))[None]).logits[0]
    return np.asarray(logits.numpy())


def worst(sequence: Sequence_, wanted: Array) -> float:
    """The largest difference; NaN if there is one."""
    return float(np.max([np.abs(row - wanted[position]).max() for position, row in sequence.logits.items()]))


def loaded(checkpoint: MakeCheckpoint, kind: str = "deepseek_v4_fast", **overrides: Any) -> Sequences:
    path, longest = checkpoint(kind, **overrides), LONG if kind == "deepseek_v4" else 1024
    return Sequences(load_program(path, threads=1, num_blocks=longest // 4 + 50, max_model_len=longest))


def test_as_released_but_small(checkpoint: MakeCheckpoint) -> None:
    """Window 128, ratios 4 and 128: 300 tokens make 75 sparse entries, of which 16 are chosen, and 2 heavy ones."""
    tokens = random_tokens(length=300)
    wanted = golden(tokens, "deepseek_v4")
    sequences = loaded(checkpoint, "deepseek_v4")
    for chunks in ([300], [64] * 5, [130, *[1] * 4, 127, *[1] * 4, 35], [31, 7, *[37] * 8]):
        sequence = sequences.add(tokens)
        sequences.run(sequence, chunks)
        assert worst(sequence, wanted) < TOLERANCE
        sequences.free(sequence)


OTHER_THETAS = {"index_topk": 512, "rope_theta": 500.0, "compress_rope_theta": 123456.0}
LONG_CASES: list[Any] = [
    (300, {"index_topk": 512}),
    (1100, OTHER_THETAS | {"layer_types": [SLIDING, HEAVY, HEAVY, HEAVY]}),
    *(pytest.param(length, {"index_topk": 64}, marks=pytest.mark.soak) for length in (700, 1333, 1700, 2000)),
    pytest.param(1100, OTHER_THETAS, marks=pytest.mark.soak),
    pytest.param(2000, {"index_topk": 16}, marks=pytest.mark.soak),
]


@pytest.mark.parametrize(("length", "overrides"), LONG_CASES)
def test_long_sequences(checkpoint: MakeCheckpoint, length: int, overrides: dict[str, Any]) -> None:
    """All logits of a prefill at once, and those of random chunks and steps."""
    tokens = random_tokens(length, length)
    wanted = golden(tokens, "deepseek_v4", **overrides)
    sequences = loaded(checkpoint, "deepseek_v4", **overrides)
    at_once = sequences.add(tokens)
    sequences.run(at_once, [length], everywhere=True)
    assert worst(at_once, wanted) < TOLERANCE
    sequences.free(at_once)
    rng, steps = np.random.default_rng(length), 4
    chunked = sequences.add(tokens)
    while (left := length - steps - chunked.computed) > 0:
        sequences.run(chunked, [min(left, int(rng.integers(1, 400)))], everywhere=True)
    sequences.run(chunked, [1] * steps)
    assert len(chunked.logits) == length
    assert worst(chunked, wanted) < TOLERANCE


@pytest.mark.parametrize("chunk", [31, LENGTH, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 2, 3, 7, 64))])
def test_chunks(checkpoint: MakeCheckpoint, chunk: int) -> None:
    tokens = random_tokens()
    sequences = loaded(checkpoint)
    sequence = sequences.add(tokens)
    sequences.run(sequence, [chunk] * LENGTH)
    assert worst(sequence, golden(tokens)) < TOLERANCE


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS.keys())
def test_variants(checkpoint: MakeCheckpoint, overrides: dict[str, Any]) -> None:
    tokens = random_tokens()
    sequences = loaded(checkpoint, **overrides)
    sequence = sequences.add(tokens)
    sequences.run(sequence, [29, 1, 1, 17, 31, 11])
    assert worst(sequence, golden(tokens, **overrides)) < TOLERANCE


def test_interleaved_requests(checkpoint: MakeCheckpoint) -> None:
    rng = np.random.default_rng(1)
    sequences = loaded(checkpoint)
    work = [sequences.add(random_tokens(seed, LENGTH + 10 * seed)) for seed in range(4)]
    while left := [s for s in work if s.computed < len(s.tokens)]:
        chosen = [s for s in left if rng.random() < 0.7] or left[:1]
        sequences.step([(s, int(min(len(s.tokens) - s.computed, rng.integers(1, 30)))) for s in chosen])
    for seed, sequence in enumerate(work):
        assert worst(sequence, golden(random_tokens(seed, LENGTH + 10 * seed))) < TOLERANCE


def test_resumed_at_every_block(checkpoint: MakeCheckpoint) -> None:
    """A request goes on from copies of what a hit needs, everything else being NaN, with tokens of its own."""
    prefix, sequences = random_tokens(), loaded(checkpoint)
    size = sequences.groups[0].block_size
    first = sequences.add(prefix)
    for end in range(size, LENGTH, size):
        sequences.run(first, [size])
        tokens = np.concatenate([prefix[:end], random_tokens(end, 25)])
        second = sequences.fork(first, tokens)
        sequences.run(second, [3, 1, 21])
        assert worst(second, golden(tokens)) < TOLERANCE


def test_resumed_at_every_large_block(checkpoint: MakeCheckpoint) -> None:
    """With ratios 4 and 128; what a hit needs is copied at each boundary, and then all other blocks become NaN."""
    prefix, ends, own = random_tokens(length=700), range(128, 700, 128), 40
    sequences = loaded(checkpoint, "deepseek_v4")
    first, forks = sequences.add(prefix), []
    for end in ends:
        sequences.run(first, [128])
        forks.append(sequences.fork(first, np.concatenate([prefix[:end], random_tokens(end, own)])))
    sequences.free(first)
    for second in forks:
        sequences.run(second, [3, 1, own - 4], everywhere=True)
        assert len(second.logits) == own
        assert worst(second, golden(second.tokens, "deepseek_v4")) < TOLERANCE
        sequences.free(second)


def test_of_equal_entries_the_first_are_chosen(checkpoint: MakeCheckpoint) -> None:
    """With one head many scores are exactly zero; whatever the chunks, the same entries are chosen."""
    tokens = random_tokens()
    found = []
    for chunks in ([LENGTH], [7] * LENGTH):
        sequences = loaded(checkpoint, index_n_heads=1, index_topk=4)
        sequence = sequences.add(tokens)
        sequences.run(sequence, chunks)
        found.append(sequence.logits[LENGTH - 1])
    assert max(np.abs(other - found[0]).max() for other in found[1:]) < TOLERANCE


def test_bfloat16_is_as_close_as_transformers_in_bfloat16(checkpoint: MakeCheckpoint) -> None:
    tokens = random_tokens()
    wanted = golden(tokens)
    model = with_dtype(random_model("deepseek_v4_fast"), torch.bfloat16)
    with torch.no_grad():
        theirs = model(torch.tensor(tokens)[None]).logits[0].float().numpy()
    sequences = Sequences(load_program(checkpoint("deepseek_v4_fast"), "bfloat16", threads=1))
    sequence = sequences.add(tokens)
    sequences.run(sequence, [1] * LENGTH)
    ours = np.stack([sequence.logits[i] for i in range(LENGTH)])
    assert np.abs(ours - wanted).mean() < 1.1 * np.abs(theirs - wanted).mean()


def test_a_row_does_not_depend_on_its_neighbours(checkpoint: MakeCheckpoint) -> None:
    """Bit by bit: alone step by step, in a batch, and in chunks."""
    tokens = [random_tokens(seed, 30 + 9 * seed) for seed in range(3)]
    alone = []
    sequences = loaded(checkpoint)
    for each in tokens:
        sequence = sequences.add(each)
        sequences.run(sequence, [1] * len(each))
        alone.append(sequence.logits)
        sequences.free(sequence)
    together = [sequences.add(each) for each in tokens]
    rng = np.random.default_rng(2)
    while left := [s for s in together if s.computed < len(s.tokens)]:
        sequences.step([(s, int(min(len(s.tokens) - s.computed, rng.integers(1, 20)))) for s in left])
    for sequence, wanted in zip(together, alone, strict=True):
        for position, row in sequence.logits.items():
            assert np.array_equal(row, wanted[position])
