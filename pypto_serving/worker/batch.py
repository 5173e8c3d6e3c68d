"""RowBatch: owner of a worker's persistent rows; turns plans into StepInputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pypto_serving.backend.base import StepBuffers, StepInputs
from pypto_serving.types.arrays import Int32Array
from pypto_serving.types.kv import KVCacheGroupSpec
from pypto_serving.types.step import BackendLimits, NewRow, StepPlan
from pypto_serving.types.tokens import unpack_ids
from pypto_serving.worker.sampler import RowSamplers


@dataclass(frozen=True, slots=True)
class PackedStep:
    """StepInputs of a plan, and the rows that sample: `sampling_rows` [s], aligned with `inputs.logits_rows`."""

    rows: Int32Array
    counts: Int32Array
    sampling_rows: Int32Array
    inputs: StepInputs


_NONE: Int32Array = np.empty(0, dtype=np.int32)


class RowBatch:
    """Owns what a worker remembers of each row: tokens, how many are computed, block tables, sampling.

    Arrays are indexed by row in [0, R), R = max_num_seqs, so that a plan only has to name differences, and the work for
    a step grows with its tokens and new blocks, not with the length of its rows.
    """

    def __init__(self, groups: tuple[KVCacheGroupSpec, ...], limits: BackendLimits, buffers: StepBuffers) -> None:
        rows = limits.max_num_seqs
        self._groups = groups
        self._buffers = buffers
        self.tokens: Int32Array = np.zeros((rows, limits.max_model_len), dtype=np.int32)
        self.num_tokens: Int32Array = np.zeros(rows, dtype=np.int32)
        self.num_computed: Int32Array = np.zeros(rows, dtype=np.int32)
        self.prompt_len: Int32Array = np.zeros(rows, dtype=np.int32)
        self.samplers = RowSamplers(rows)
        self._tables = [PackedTable(table) for table in buffers.block_tables]
        self._offsets: Int32Array = np.arange(limits.max_num_batched_tokens, dtype=np.int32)

    def pack(self, plan: StepPlan) -> PackedStep:
        """Take in a plan's differences and lay out its tokens in the step buffers."""
        for row in unpack_ids(plan.drops).tolist():
            self.num_tokens[row] = 0
            self.samplers.clear(row)
        fresh: list[list[Int32Array]] = [[] for _ in self._groups]
        for new in plan.new_rows:
            self._add(new, fresh)
        for table, data, ids in zip(self._tables, plan.new_blocks, fresh, strict=True):
            if data:
                pairs = unpack_ids(data).reshape(-1, 2)
                table.append(pairs.tolist())
                ids.append(pairs[:, 1])
        blocks = tuple(np.concatenate(ids) if ids else _NONE for ids in fresh)
        return self._lay_out(unpack_ids(plan.rows), unpack_ids(plan.num_tokens), blocks)

    def _add(self, new: NewRow, fresh: list[list[Int32Array]]) -> None:
        tokens = unpack_ids(new.token_ids)
        self.tokens[new.row, : len(tokens)] = tokens
        self.num_tokens[new.row] = len(tokens)
        self.num_computed[new.row] = new.num_computed
        self.prompt_len[new.row] = new.prompt_len
        self.samplers.set(new.row, new.sampling)
        for group, table, data, ids in zip(self._groups, self._tables, new.blocks, fresh, strict=True):
            blocks = unpack_ids(data)
            table.set(new.row, blocks)
            ids.append(blocks[new.num_computed // group.block_size :])

    def _lay_out(self, rows: Int32Array, counts: Int32Array, fresh: tuple[Int32Array, ...]) -> PackedStep:
        buffers, num_rows, num_tokens = self._buffers, len(rows), int(counts.sum())
        computed = self.num_computed[rows]
        starts = buffers.query_start[: num_rows + 1]
        counts.cumsum(out=starts[1:])
        positions, token_ids = buffers.positions[:num_tokens], buffers.token_ids[:num_tokens]
        if num_tokens == num_rows:
            owner = rows
            positions[:] = computed
        else:
            owner = rows.repeat(counts)
            np.add(self._offsets[:num_tokens], (computed - starts[:-1]).repeat(counts), out=positions)
        token_ids[:] = self.tokens[owner, positions]
        ends = buffers.context_lens[:num_rows]
        np.add(computed, counts, out=ends)
        samples = (ends == self.num_tokens[rows]).nonzero()[0]
        logits_rows = buffers.logits_rows[: len(samples)]
        np.subtract(starts[1:][samples], 1, out=logits_rows)
        inputs = StepInputs(
            token_ids=token_ids,
            positions=positions,
            query_start=starts,
            context_lens=ends,
            logits_rows=logits_rows,
            slot_mapping=tuple(self._slots(g, owner, positions) for g in range(len(self._groups))),
            block_tables=tuple(table.pack(rows) for table in self._tables),
            fresh_blocks=fresh,
        )
        return PackedStep(rows, counts, rows[samples], inputs)

    def _slots(self, g: int, owner: Int32Array, positions: Int32Array) -> Int32Array:
        """slot = block id * block_size + position % block_size."""
        slots = self._buffers.slot_mapping[g][: len(positions)]
        index, within = np.divmod(positions, self._groups[g].block_size)
        np.multiply(self._tables[g].blocks[owner, index], self._groups[g].block_size, out=slots)
        slots += within
        return slots

    def advance(self, step: PackedStep, token_ids: Int32Array) -> None:
        """The step ran: its tokens are computed, and each sampling row continues with its token."""
        self.num_computed[step.rows] += step.counts
        rows = step.sampling_rows
        ends = self.num_tokens[rows]
        if len(rows) and ends.max() >= self.tokens.shape[1]:
            fits = ends < self.tokens.shape[1]
            self.tokens[rows[fits], ends[fits]] = token_ids[fits]
        else:
            self.tokens[rows, ends] = token_ids
        self.num_tokens[rows] = ends + 1


class PackedTable:
    """Owns the block tables of all rows in one group, and a step's copy of them in `buffer` [R, n], packed.

    A place of the buffer that the same row had in the step before is only added to.
    """

    def __init__(self, buffer: Int32Array) -> None:
        self.blocks: Int32Array = np.zeros_like(buffer)
        self._len: Int32Array = np.zeros(len(buffer), dtype=np.int32)
        self._buffer = buffer
        self._owner: Int32Array = np.full(len(buffer), -1, dtype=np.int32)
        self._copied: Int32Array = np.zeros(len(buffer), dtype=np.int32)

    def set(self, row: int, blocks: Int32Array) -> None:
        """The table of a new row."""
        self.blocks[row, : len(blocks)] = blocks
        self._len[row] = len(blocks)
        self._owner[self._owner == row] = -1

    def append(self, pairs: list[list[int]]) -> None:
        """Add blocks, (row, block id) each, to the ends of rows' tables."""
        for row, block_id in pairs:
            self.blocks[row, self._len[row]] = block_id
            self._len[row] += 1

    def pack(self, rows: Int32Array) -> Int32Array:
        """Tables of `rows` [r], as wide as the longest."""
        owner, copied, lengths = self._owner[: len(rows)], self._copied[: len(rows)], self._len[rows]
        copied[owner != rows] = 0
        for place in (copied != lengths).nonzero()[0].tolist():
            entries = slice(copied[place], lengths[place])
            self._buffer[place, entries] = self.blocks[rows[place], entries]
        owner[:], copied[:] = rows, lengths
        return self._buffer[: len(rows), : lengths.max(initial=0)]
