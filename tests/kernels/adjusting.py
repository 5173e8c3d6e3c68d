"""Rows whose logits change, for samplers under test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pypto_serving.types.arrays import pack_ids
from pypto_serving.types.sampler import LogitAdjustments, MaskArray
from pypto_serving.types.sampling import RowSampling
from pypto_serving.worker.sampler import RowAdjustments


def adjustments(
    rows: Sequence[RowSampling],
    histories: Sequence[Sequence[int]],
    prompt_lens: Sequence[int],
    vocab: int,
    masks: Mapping[int, MaskArray] | None = None,
) -> LogitAdjustments | None:
    """What changes the next token of rows with these tokens so far; `masks` by row are those of a grammar."""
    tokens = np.full((len(rows), max(map(len, histories)) + 1), -7, np.int32)
    owner = RowAdjustments(tokens, vocab)
    for row, (sampling, history, prompt_len) in enumerate(zip(rows, histories, prompt_lens, strict=True)):
        tokens[row, : len(history)] = history
        owner.set_row(row, sampling, prompt_len)
    for row, mask in (masks or {}).items():
        owner.masks.put(row, 0, mask)
    positions = np.array([len(history) for history in histories], np.int32)
    return owner.for_rows(np.arange(len(rows), dtype=np.int32), positions, positions)


def mask_of(allowed: Sequence[int], vocab: int) -> MaskArray:
    """A mask that allows these ids."""
    bits = np.zeros(-(-vocab // 32), np.uint32)
    for token in allowed:
        bits[token // 32] |= np.uint32(1 << token % 32)
    return bits


def random_row(rng: np.random.Generator, vocab: int, history: Sequence[int]) -> RowSampling:
    """A row that asks for some of all changes, of tokens near its history and anywhere."""

    def ids(most: int) -> list[int]:
        near = rng.choice(history, most).tolist() if len(history) else []
        return [*near[: most // 2], *rng.integers(0, vocab, most - most // 2).tolist()]

    biases = dict.fromkeys(ids(8)) if rng.random() < 0.5 else {}
    words = [ids(int(rng.integers(1, 4))) for _ in range(4)] + [[*history[-2:], int(rng.integers(vocab))]]
    penalized = rng.random() < 0.7
    return RowSampling(
        temperature=float(rng.choice([0.0, 0.7])),
        min_tokens=int(rng.integers(0, 40)),
        banned_ids=pack_ids(ids(3)),
        bias_ids=pack_ids(biases),
        bias_values=rng.uniform(-9, 9, len(biases)).astype("<f4").tobytes(),
        allowed_ids=pack_ids(ids(30)) if rng.random() < 0.3 else b"",
        repetition_penalty=float(rng.choice([1.0, 0.5, 1.3])) if penalized else 1.0,
        frequency_penalty=float(rng.choice([0.0, 0.3, -1.1])) if penalized else 0.0,
        presence_penalty=float(rng.choice([0.0, 1.7, -0.4])) if penalized else 0.0,
        bad_words=tuple(map(pack_ids, words)) if rng.random() < 0.5 else (),
    )
