"""RowBatch: owner of a worker's persistent rows; turns plans into StepInputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pypto_serving.backend.base import Int32Array, StepBuffers, StepInputs
from pypto_serving.types.kv import KVCacheGroupSpec
from pypto_serving.types.sampling import RowSampling
from pypto_serving.types.step import BackendLimits, NewRow, StepPlan
from pypto_serving.types.tokens import unpack_ids


@dataclass(frozen=True, slots=True)
class PackedStep:
    """StepInputs of a plan, and the rows that sample: `sampling_rows` [s], aligned with `inputs.logits_rows`."""

    rows: Int32Array
    counts: Int32Array
    sampling_rows: Int32Array
    inputs: StepInputs


class RowBatch:
    """Owns what a worker remembers of each row: tokens, how many are computed, block tables, sampling.

    Arrays are indexed by row in [0, R), R = max_num_seqs, so that a plan only has to name differences.
    """

    def __init__(self, groups: tuple[KVCacheGroupSpec, ...], limits: BackendLimits, buffers: StepBuffers) -> None:
        rows = limits.max_num_seqs
        self._groups = groups
        self._buffers = buffers
        self.tokens: Int32Array = np.zeros((rows, limits.max_model_len), dtype=np.int32)
        self.num_tokens: Int32Array = np.zeros(rows, dtype=np.int32)
        self.num_computed: Int32Array = np.zeros(rows, dtype=np.int32)
        self.prompt_len: Int32Array = np.zeros(rows, dtype=np.int32)
        self.sampling: list[RowSampling | None] = [None] * rows
        self._tables = [np.zeros_like(table) for table in buffers.block_tables]
        self._table_len = [np.zeros(rows, dtype=np.int32) for _ in groups]

    def pack(self, plan: StepPlan) -> PackedStep:
        """Take in a plan's differences and lay out its tokens in the step buffers."""
        for row in unpack_ids(plan.drops):
            self.num_tokens[row] = 0
            self.sampling[row] = None
        fresh: list[list[Int32Array]] = [[] for _ in self._groups]
        for new in plan.new_rows:
            self._add(new, fresh)
        for g, pairs in enumerate(plan.new_blocks):
            self._append_blocks(g, unpack_ids(pairs).reshape(-1, 2), fresh[g])
        rows, counts = unpack_ids(plan.rows), unpack_ids(plan.num_tokens)
        blocks = tuple(np.concatenate(ids) if ids else np.empty(0, dtype=np.int32) for ids in fresh)
        return self._lay_out(rows, counts, blocks)

    def _add(self, new: NewRow, fresh: list[list[Int32Array]]) -> None:
        tokens = unpack_ids(new.token_ids)
        self.tokens[new.row, : len(tokens)] = tokens
        self.num_tokens[new.row] = len(tokens)
        self.num_computed[new.row] = new.num_computed
        self.prompt_len[new.row] = new.prompt_len
        self.sampling[new.row] = new.sampling
        for g, (group, data) in enumerate(zip(self._groups, new.blocks, strict=True)):
            blocks = unpack_ids(data)
            self._tables[g][new.row, : len(blocks)] = blocks
            self._table_len[g][new.row] = len(blocks)
            fresh[g].append(blocks[new.num_computed // group.block_size :])

    def _append_blocks(self, g: int, pairs: Int32Array, fresh: list[Int32Array]) -> None:
        lengths, table = self._table_len[g], self._tables[g]
        for row, block_id in pairs:
            table[row, lengths[row]] = block_id
            lengths[row] += 1
        fresh.append(pairs[:, 1])

    def _lay_out(self, rows: Int32Array, counts: Int32Array, fresh: tuple[Int32Array, ...]) -> PackedStep:
        buffers, num_rows, num_tokens = self._buffers, len(rows), int(counts.sum())
        starts = buffers.query_start[: num_rows + 1]
        starts[0] = 0
        np.cumsum(counts, out=starts[1:])
        owner = np.repeat(rows, counts)
        positions = buffers.positions[:num_tokens]
        positions[:] = np.arange(num_tokens) + np.repeat(self.num_computed[rows] - starts[:-1], counts)
        token_ids = buffers.token_ids[:num_tokens]
        token_ids[:] = self.tokens[owner, positions]
        ends = buffers.context_lens[:num_rows]
        np.add(self.num_computed[rows], counts, out=ends)
        samples = np.flatnonzero(ends == self.num_tokens[rows])
        logits_rows = buffers.logits_rows[: len(samples)]
        logits_rows[:] = starts[1:][samples] - 1
        inputs = StepInputs(
            token_ids=token_ids,
            positions=positions,
            query_start=starts,
            context_lens=ends,
            logits_rows=logits_rows,
            slot_mapping=tuple(self._slots(g, owner, positions) for g in range(len(self._groups))),
            block_tables=tuple(self._packed_tables(g, rows) for g in range(len(self._groups))),
            fresh_blocks=fresh,
        )
        return PackedStep(rows, counts, rows[samples], inputs)

    def _slots(self, g: int, owner: Int32Array, positions: Int32Array) -> Int32Array:
        """slot = block id * block_size + position % block_size."""
        size = self._groups[g].block_size
        slots = self._buffers.slot_mapping[g][: len(positions)]
        np.multiply(self._tables[g][owner, positions // size], size, out=slots)
        slots += positions % size
        return slots

    def _packed_tables(self, g: int, rows: Int32Array) -> Int32Array:
        width = int(self._table_len[g][rows].max(initial=0))
        packed = self._buffers.block_tables[g][: len(rows), :width]
        packed[:] = self._tables[g][rows, :width]
        return packed

    def advance(self, step: PackedStep, token_ids: Int32Array) -> None:
        """The step ran: its tokens are computed, and each sampling row continues with its token."""
        self.num_computed[step.rows] += step.counts
        ends = self.num_tokens[step.sampling_rows]
        fits = ends < self.tokens.shape[1]
        self.tokens[step.sampling_rows[fits], ends[fits]] = token_ids[fits]
        self.num_tokens[step.sampling_rows] += 1
