"""RowAdjustments and RowMasks: what changes a row's logits, for how long, and behind drafts."""

from __future__ import annotations

import numpy as np

from pypto_serving.backend.numpy_sampler import PlainSampler
from pypto_serving.types.arrays import Int32Array, pack_ids
from pypto_serving.types.sampling import RowSampling
from pypto_serving.worker.masks import RowMasks
from pypto_serving.worker.sampler import RowAdjustments, RowSamplers
from tests.kernels.adjusting import mask_of

VOCAB = 40


def int32(*values: int) -> Int32Array:
    return np.array(values, np.int32)


def test_rows_without_changes_cost_nothing() -> None:
    owner = RowAdjustments(np.zeros((3, 16), np.int32), VOCAB)
    for row in range(3):
        owner.set_row(row, RowSampling(temperature=1.0, min_tokens=5, seed=3), 4)
    assert owner.for_rows(int32(0, 1, 2), int32(4, 4, 4), int32(4, 4, 4)) is None


def test_bans_alone_end_with_min_tokens() -> None:
    owner = RowAdjustments(np.zeros((2, 16), np.int32), VOCAB)
    owner.set_row(1, RowSampling(min_tokens=3, banned_ids=pack_ids([7])), 4)
    made = owner.for_rows(int32(0, 1), int32(6, 6), int32(6, 6))
    assert made is not None and made.rows.tolist() == [-1, 1]
    assert owner.for_rows(int32(0, 1), int32(7, 7), int32(7, 7)) is None
    ahead = owner.for_rows(int32(1), int32(9), int32(6))
    assert ahead is not None, "a device may reject the drafts in flight and go back"


def test_a_row_that_goes_takes_its_changes_along() -> None:
    owner = RowAdjustments(np.zeros((2, 16), np.int32), VOCAB)
    owner.set_row(0, RowSampling(bias_ids=pack_ids([7]), bias_values=np.float32(2).tobytes()), 4)
    owner.set_row(1, RowSampling(presence_penalty=1.0, allowed_ids=pack_ids([3])), 4)
    both = owner.for_rows(int32(0, 1), int32(5, 5), int32(5, 5))
    assert both is not None and both.rows.tolist() == [0, 1] and both.mask_rows.tolist() == [-1, 1]
    owner.clear_row(1)
    left = owner.for_rows(int32(0, 1), int32(5, 5), int32(5, 5))
    assert left is not None and left.rows.tolist() == [0, -1] and left.mask_rows.tolist() == [-1, -1]
    assert both.table.changes["presence"].tolist() == [0, 1], "a dispatch in flight keeps what it was given"
    owner.clear_row(0)
    assert owner.for_rows(int32(0, 1), int32(5, 5), int32(5, 5)) is None


def test_each_draft_has_its_own_mask() -> None:
    masks = RowMasks(3, VOCAB, max_drafts=2)
    assert not masks
    masks.put(1, 0, mask_of([4], VOCAB))
    masks.put(1, 2, mask_of([6], VOCAB))
    masks.allow(2, int32(1, 6))
    masks.put(2, 1, mask_of([5, 6], VOCAB))
    at = masks.find(int32(0, 1, 1, 1, 2, 2, 2)).tolist()
    wanted = [None, [4], None, [6], [1, 6], [6], [1, 6]]
    for index, ids in zip(at, wanted, strict=True):
        assert (index < 0) == (ids is None)
        assert ids is None or masks.bits[index].tolist() == mask_of(ids, VOCAB).tolist()
    masks.put(2, 1, mask_of([7], VOCAB))
    assert masks.bits[masks.find(int32(2, 2))[1]].tolist() == mask_of([7], VOCAB).tolist(), "nothing in common"
    masks.put(1, 0, None)
    masks.put(2, 1, None)
    assert masks.find(int32(1, 2)).tolist()[0] == -1
    assert masks.bits[masks.find(int32(2, 2))[1]].tolist() == mask_of([1, 6], VOCAB).tolist()
    masks.put(1, 2, None)
    masks.clear(2)
    assert not masks and masks.find(int32(1, 2)).tolist() == [-1, -1]


def test_behind_a_draft_counts_what_stands_before_it() -> None:
    """Drafts stand behind the known tokens; those that are rejected are written over, and do not count any more."""
    tokens = np.zeros((2, 16), np.int32)
    tokens[1, :5] = [1, 2, 3, 3, 3]  # a prompt of two tokens, an output of one, two drafts
    samplers = RowSamplers(tokens, VOCAB, max_drafts=2)
    samplers.set_row(1, RowSampling(frequency_penalty=1.0), 2)
    logits = np.tile(np.where(np.arange(VOCAB) == 3, 1.5, 0).astype(np.float32), (3, 1))
    logits[:, 9] = 0.0625
    chosen, _ = samplers.sample(logits, int32(1, 1, 1), int32(3, 4, 5), PlainSampler())
    assert chosen.tolist() == [3, 9, 9]
    tokens[1, 3:5] = [9, 9]
    chosen, _ = samplers.sample(logits, int32(1, 1, 1), int32(3, 4, 5), PlainSampler())
    assert chosen.tolist() == [3, 3, 3]
