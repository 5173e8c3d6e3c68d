"""What the draft layer predicts, against parts of transformers in float32, whatever was computed how before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pypto_serving.kernels import runnable
from tests.checkpoints import DEEPSEEK_V4, random_model
from tests.deepseek_v4 import RandomDrafts, streams_of
from tests.model.conftest import MakeCheckpoint
from tests.model.sequences import Array, Sequences, load_program
from tests.needs import needs_kernels

TOLERANCE = 1e-4
LENGTH, PASSES = 60, 3
ROOM = 1.5
"""A token that goes to another expert makes a larger difference than rounding: medians say little of eight tokens."""
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "no other SWA layer": {"layer_types": ["compressed_sparse_attention"] * 4},
    "three streams": {"hc_mult": 3, "hc_sinkhorn_iters": 3},
}


def random_tokens(seed: int, length: int = LENGTH) -> Array:
    return np.random.default_rng(seed).integers(0, 256, length)


class Golden:
    """The drafts of a composition of `transformers`."""

    def __init__(self, kind: str = "deepseek_v4_fast", **overrides: Any) -> None:
        self._model = random_model(kind, **overrides)
        self._drafts = RandomDrafts(0, DEEPSEEK_V4[kind] | overrides)

    def logits(self, tokens: Array, passes: int) -> Array:
        """Logits [passes, vocab] behind `tokens`, greedily: each pass has the streams of the one before."""
        given, found = torch.tensor(tokens), []
        streams, following = streams_of(self._model, given[:-1]), given[1:]
        for _ in range(passes):
            logits, out = self._drafts(self._model, streams, following)
            found.append(logits[-1])
            streams = torch.cat([streams, out[-1:]])
            following = torch.cat([following, logits[-1:].argmax(1)])
        return np.asarray(torch.stack(found).numpy())


def loaded(checkpoint: MakeCheckpoint, kind: str = "deepseek_v4_fast", blocks: int = 80, **overrides: Any) -> Sequences:
    path = checkpoint(kind, **overrides)
    return Sequences(load_program(path, threads=1, num_blocks=blocks, max_model_len=1024, num_drafts=PASSES))


@pytest.mark.golden
@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS.keys())
def test_drafts_of_positions(checkpoint: MakeCheckpoint, overrides: dict[str, Any]) -> None:
    """Behind some tokens, whether the ones before were computed in one chunk or many, and after drafts."""
    tokens, golden, sequences = random_tokens(1), Golden(**overrides), loaded(checkpoint, **overrides)
    sequence, rng = sequences.add(np.resize(tokens, LENGTH + PASSES + 1)), np.random.default_rng(0)
    while (end := sequence.computed + int(rng.integers(1, 11))) < LENGTH:
        sequence.tokens[:LENGTH] = tokens
        sequences.step([(sequence, end - sequence.computed)])
        wanted = golden.logits(tokens[: end + 1], PASSES)
        assert np.abs(sequences.draft([sequence], PASSES)[0] - wanted).max() < TOLERANCE


@pytest.mark.golden
def test_drafts_as_released_but_small(checkpoint: MakeCheckpoint) -> None:
    """A window of 128, which 300 tokens fill."""
    tokens, golden = random_tokens(2, 300), Golden("deepseek_v4")
    sequences = loaded(checkpoint, "deepseek_v4", blocks=150)
    for chunks in ([299], [64] * 4 + [43], [130, 1, 1, 127, 40]):
        sequence = sequences.add(np.resize(tokens, 310))
        for chunk in chunks:
            sequences.step([(sequence, chunk)])
        found = sequences.draft([sequence], PASSES)[0]
        assert np.abs(found - golden.logits(tokens, PASSES)).max() < TOLERANCE
        sequences.free(sequence)


@pytest.mark.golden
def test_drafts_after_a_prefix_hit_at_every_block(checkpoint: MakeCheckpoint) -> None:
    """A request goes on from copies of what a hit needs, everything else being NaN, with tokens of its own."""
    prefix, golden, sequences = random_tokens(3), Golden(), loaded(checkpoint)
    size = max(group.block_size for group in sequences.groups)
    first = sequences.add(prefix)
    for end in range(size, LENGTH, size):
        sequences.run(first, [size])
        tokens = np.concatenate([prefix[:end], random_tokens(end, 20)])
        second = sequences.fork(first, np.resize(tokens, len(tokens) + PASSES))
        for count in (1, 3, 12):
            sequences.step([(second, count)])
            second.tokens[: len(tokens)] = tokens
            wanted = golden.logits(tokens[: second.computed + 1], PASSES)
            assert np.abs(sequences.draft([second], PASSES)[0] - wanted).max() < TOLERANCE
            second.tokens[: len(tokens)] = tokens


@needs_kernels
@pytest.mark.parametrize("kind", [pytest.param("deepseek_v4_fast", marks=pytest.mark.soak), "deepseek_v4"])
def test_drafts_of_the_kernels(checkpoint: MakeCheckpoint, kind: str) -> None:
    """About as close to float32 as torch in bfloat16 is; the same bits in any company, after any chunks."""
    path, tokens = checkpoint(kind, dtype="bfloat16", o_lora_rank=32), [random_tokens(seed, 150) for seed in range(8)]
    found = {}
    for name, dtype, kernels in (
        ("exact", "float32", "torch"),
        ("torch", "bfloat16", "torch"),
        ("ours", "bfloat16", ""),
    ):
        options = {"num_blocks": 400, "num_drafts": PASSES, "threads": 1, "kernels": kernels or runnable()[0]}
        sequences = Sequences(load_program(path, dtype, **options))
        work = [sequences.add(np.resize(each, 160)) for each in tokens]
        sequences.step([(each, 140) for each in work])
        found[name] = sequences.draft(work, 1)
    errors = {name: np.median(np.abs(found[name] - found["exact"]).mean(axis=2)) for name in ("torch", "ours")}
    assert errors["ours"] < ROOM * errors["torch"]
    for each, wanted in zip(tokens, found["ours"], strict=True):
        alone = sequences.add(np.resize(each, 160))
        for count in (1, 100, 7, 32):
            sequences.step([(alone, count)])
        assert np.array_equal(sequences.draft([alone], 1)[0], wanted)
        sequences.free(alone)
