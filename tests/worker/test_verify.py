"""What rows keep of a dispatch: drafts up to the first wrong one, and faults of single rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypto_serving.backend.base import SampledTokens, StepInputs
from pypto_serving.backend.numpy_sampler import PlainSampler
from pypto_serving.types.arrays import Int32Array
from pypto_serving.types.sampling import RowSampling
from pypto_serving.worker.batch import Dispatch
from pypto_serving.worker.guides import StepConstraints
from pypto_serving.worker.sampler import RowSamplers
from pypto_serving.worker.verify import (
    DispatchResult,
    apply_guides,
    read_device_tokens,
    sample_and_verify,
    verify_drafts,
)

VOCAB = 50


def int32(values: list[int]) -> Int32Array:
    return np.array(values, dtype=np.int32)


def dispatch(tokens: list[list[int]]) -> Dispatch:
    """Rows that sample, each with its last known token and the drafts behind it."""
    flat, starts = int32([t for row in tokens for t in row]), np.cumsum([0, *map(len, tokens)], dtype=np.int32)
    places = np.arange(len(tokens), dtype=np.int32)
    none = int32([])
    inputs = StepInputs(
        token_ids=flat,
        positions=flat,
        query_start=starts,
        context_lens=places,
        logits_rows=np.arange(len(flat), dtype=np.int32),
        slot_mapping=(),
        block_tables=(),
        fresh_blocks=(),
    )
    drafts = int32([len(row) - 1 for row in tokens])
    return Dispatch(inputs, places, places, places, drafts if drafts.any() else None, none - 1, none)


def chosen(tokens: list[list[int]], targets: list[int]) -> DispatchResult:
    """What greedy rows keep where the model's best tokens are `targets`; -1 for logits that are not finite."""
    samplers = RowSamplers(np.zeros((len(tokens), 16), np.int32), VOCAB)
    for row in range(len(tokens)):
        samplers.set_row(row, RowSampling(num_logprobs=1), 0)
    logits = np.zeros((len(targets), VOCAB), np.float32)
    logits[np.arange(len(targets)), targets] = [np.nan if target < 0 else 5.0 for target in targets]
    return sample_and_verify(dispatch(tokens), logits, samplers, PlainSampler())


@given(st.lists(st.lists(st.sampled_from("rw"), max_size=4), min_size=1, max_size=6), st.randoms())
def test_a_row_keeps_its_drafts_up_to_the_first_wrong_one(rows: list[list[str]], rng: object) -> None:
    targets = [[int(i + 7 * n) % VOCAB for i in range(len(row) + 1)] for n, row in enumerate(rows)]
    tokens = [
        [0, *(target if kind == "r" else (target + 1) % VOCAB for kind, target in zip(row, target_row, strict=False))]
        for row, target_row in zip(rows, targets, strict=True)
    ]
    found = chosen(tokens, [t for row in targets for t in row])
    right = [(row.index("w") if "w" in row else len(row)) + 1 for row in rows]
    assert found.each(len(rows)).tolist() == right
    kept = [t for row, count in zip(targets, right, strict=True) for t in row[:count]]
    assert found.token_ids.tolist() == kept
    assert [entry.row for entry in found.logprobs] == [n for n, count in enumerate(right) for _ in range(count)]
    assert found.faults == []


def test_rows_without_drafts_between_those_with() -> None:
    tokens, drafted, widths = int32([5, 6, 9, 3, 8]), int32([5, 7, 1, 3, 0]), int32([3, 1, 1])
    assert verify_drafts(tokens, drafted, widths.cumsum() - widths, widths).tolist() == [2, 1, 1]


@pytest.mark.parametrize("drafts", [False, True])
def test_a_row_that_is_not_finite_fails_alone(drafts: bool) -> None:
    if drafts:
        found = chosen([[0, 4, 5], [0], [0, 9]], [4, -1, 6, 7, -1, 2])
        assert (found.token_ids.tolist(), found.each(3).tolist()) == ([4, 7], [1, 1, 0])
    else:
        found = chosen([[0], [0], [0]], [4, -1, 6])
        assert (found.token_ids.tolist(), found.each(3).tolist()) == ([4, 6], [1, 0, 1])
    assert [fault.row for fault in found.faults] == ([0, 2] if drafts else [1])
    assert [entry.row for entry in found.logprobs] == ([0, 1] if drafts else [0, 2])


def test_a_row_that_waits_for_its_guide_keeps_nothing_and_accepts_no_drafts() -> None:
    """Three rows verify two drafts, both right: one waits, one is forced to other tokens from the second on."""
    tokens = [[0, 4, 5]] * 3
    constraints = StepConstraints(guides={}, withheld={0}, forced={1: (4, 9, 9)}, faults={}, known_drafts={})
    found = apply_guides(dispatch(tokens), chosen(tokens, [4, 5, 6] * 3), constraints)
    assert found.token_ids.tolist() == [4, 9, 9, 4, 5, 6]
    assert (found.each(3).tolist(), found.each_accepted(3).tolist()) == ([0, 3, 3], [0, 1, 2])


def test_a_device_says_which_rows_failed() -> None:
    sampled = SampledTokens(counts=int32([2, 1]), token_ids=int32([4, -1, 7]))
    found = read_device_tokens(dispatch([[0, 1, 2], [0]]), sampled)
    assert (found.token_ids.tolist(), found.each(2).tolist()) == ([4, 7], [1, 1])
    assert [fault.row for fault in found.faults] == [0]
