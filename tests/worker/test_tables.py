"""The order of rows in dispatch buffers: a row that leaves costs the copy of one other row's table, not of all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pypto_serving.backend.base import StepBuffers
from pypto_serving.types.arrays import pack_ids
from pypto_serving.types.kv import FullSpec, KVTensorSpec
from pypto_serving.types.sampling import RowSampling
from pypto_serving.types.step import BackendLimits, NewRow, StepPlan
from pypto_serving.worker.batch import Dispatch, RowBatch
from pypto_serving.worker.layout import Lines

TENSOR = KVTensorSpec(name="k", layers=(0,), dtype="bfloat16", row_shape=(1,))
GROUPS = (
    FullSpec(name="full", tensors=(TENSOR,), block_size=4),
    FullSpec(name="other", tensors=(TENSOR,), block_size=8),
)
ROWS, LENGTH = 16, 64


@given(st.lists(st.lists(st.integers(0, ROWS - 1), unique=True), min_size=2, max_size=8))
def test_rows_keep_their_lines(dispatches: list[list[int]]) -> None:
    lines, before = Lines(ROWS), np.full(ROWS, -1, np.int32)
    for asked in dispatches:
        rows = np.array(asked, np.int32)
        for _ in range(2):  # the second time from memory
            order = lines.order(rows)
            arranged = rows if order is None else rows[order]
            assert sorted(arranged.tolist()) == sorted(asked)
            stays = [line for line, row in enumerate(before[: len(rows)]) if row in asked]
            assert np.array_equal(arranged[stays], before[stays])
            before = np.concatenate([arranged, [-1 if row in asked else row for row in before[len(rows) :]]])


class Worker:
    """A RowBatch with `ROWS` decoding rows of 40 tokens."""

    def __init__(self) -> None:
        limits = BackendLimits(max_num_seqs=ROWS, max_num_batched_tokens=1024, max_model_len=LENGTH)
        self.buffers = StepBuffers.in_host_memory(GROUPS, limits)
        self.batch = RowBatch(GROUPS, limits, [self.buffers], 1000)
        self.steps = 0

    def step(self, rows: Sequence[int], drops: Sequence[int] = (), new: Sequence[int] = ()) -> Dispatch:
        self.steps += 1
        plan = StepPlan(
            step_id=self.steps,
            epoch=0,
            rows=pack_ids(rows),
            num_tokens=pack_ids([1] * len(rows)),
            new_rows=[self.new_row(row) for row in new],
            new_blocks=(b"", b""),
            drops=pack_ids(drops),
        )
        (dispatch,) = self.batch.pack_plan(plan)
        self.batch.advance(dispatch, None, dispatch.rows + 100)
        return dispatch

    def new_row(self, row: int) -> NewRow:
        blocks = tuple(pack_ids(range(1 + 100 * row, 1 + 100 * row + LENGTH // g.block_size)) for g in GROUPS)
        tokens = pack_ids([row] * 40)
        return NewRow(row=row, token_ids=tokens, prompt_len=40, num_computed=39, blocks=blocks, sampling=RowSampling())

    def copied_lines(self, dispatch: Dispatch) -> int:
        """Count the lines whose first block was written since the buffers were marked; check all others."""
        marked = dispatch.inputs.block_tables[0][:, 0] == -7
        for table in dispatch.inputs.block_tables:
            firsts = 1 + 100 * dispatch.inputs.rows
            assert ((table[:, 0] == -7) == marked).all()
            assert (table[~marked, 0] == firsts[~marked]).all()
            assert (table[:, 1] == firsts + 1).all()
        return int((~marked).sum())

    def mark(self) -> None:
        for table in self.buffers.block_tables:
            table[:, 0] = -7


def test_a_row_that_leaves_moves_one_other_row() -> None:
    worker, rows = Worker(), list(range(ROWS))
    worker.step(rows, new=rows)
    worker.mark()
    assert worker.copied_lines(worker.step(rows)) == 0
    for gone in (0, 7, 15, 3):
        rows.remove(gone)
        worker.mark()
        dispatch = worker.step(rows, drops=[gone])
        assert sorted(dispatch.rows.tolist()) == rows
        assert worker.copied_lines(dispatch) <= 1
        assert worker.copied_lines(worker.step(rows)) <= 1
    worker.mark()
    assert worker.copied_lines(worker.step([*rows, 7], new=[7])) == 1


def test_each_row_gets_its_own_tokens_whatever_its_line() -> None:
    worker, rows = Worker(), list(range(ROWS))
    worker.step(rows, new=rows)
    for gone in (2, 0, 9):
        rows.remove(gone)
        inputs = worker.step(rows, drops=[gone]).inputs
        assert np.array_equal(inputs.token_ids, inputs.rows + 100)
        assert len(set(inputs.positions.tolist())) == 1
