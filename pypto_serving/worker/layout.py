"""DispatchLayout: write rows, tokens, slots and block tables of a dispatch into its buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pypto_serving.backend.base import DispatchKind, StepBuffers, StepInputs
from pypto_serving.types.arrays import Int32Array
from pypto_serving.types.kv import KVCacheGroupSpec
from pypto_serving.worker.prompt_logprobs import PromptSpan, logits_rows, num_logits


class RowTables:
    """Owns the block tables of all rows in one group: row i has the first `lengths[i]` ids of blocks[i]; [R, n]."""

    def __init__(self, rows: int, copies: list[PackedTable]) -> None:
        self.blocks: Int32Array = np.zeros((rows, copies[0].width), dtype=np.int32)
        self.lengths: Int32Array = np.zeros(rows, dtype=np.int32)
        self._copies = copies

    def set_row(self, row: int, blocks: Int32Array) -> None:
        """Set the block table of a new row."""
        self.blocks[row, : len(blocks)] = blocks
        self.lengths[row] = len(blocks)
        for copy in self._copies:
            copy.forget_row(row)

    def append_blocks(self, pairs: list[list[int]]) -> None:
        """Append blocks to rows' tables, as pairs (row, block id)."""
        for row, block_id in pairs:
            self.blocks[row, self.lengths[row]] = block_id
            self.lengths[row] += 1


class PackedTable:
    """Owns one dispatch's packed copy of a group's block tables, in `buffer` [R, n].

    If a line of the buffer had the same row in the last dispatch, only new ids are copied.
    """

    def __init__(self, buffer: Int32Array) -> None:
        self.width = buffer.shape[1]
        self._buffer = buffer
        self._owner: Int32Array = np.full(len(buffer), -1, dtype=np.int32)
        self._copied: Int32Array = np.zeros(len(buffer), dtype=np.int32)

    def forget_row(self, row: int) -> None:
        """Mark the table of `row` to be copied completely next time, since the row has a new request."""
        self._owner[self._owner == row] = -1

    def pack_rows(self, tables: RowTables, rows: Int32Array, padded: int) -> Int32Array:
        """Copy the tables of `rows` [r], then null blocks up to `padded` rows. Return a view of the longest's width."""
        num_rows = len(rows)
        owner, copied, lengths = self._owner[:num_rows], self._copied[:num_rows], tables.lengths[rows]
        if owner.tobytes() != rows.tobytes():
            copied[owner != rows] = 0
            owner[:] = rows
        if copied.tobytes() != lengths.tobytes():
            for place in (copied != lengths).nonzero()[0].tolist():
                entries = slice(copied[place], lengths[place])
                self._buffer[place, entries] = tables.blocks[rows[place], entries]
            copied[:] = lengths
        if padded > num_rows:
            self._owner[num_rows:padded] = -1
            self._buffer[num_rows:padded, 0] = 0
        return self._buffer[:padded, : lengths.max(initial=0)]


class Lines:
    """Owns the order of rows in one dispatch's buffers. A row keeps its line, so that its tables need no new copy.

    When a row leaves, its line is given to a new row, or to the row on the last line.
    """

    def __init__(self, num_lines: int) -> None:
        # One extra entry, indexed by -1, which means no row and no line.
        self._rows: Int32Array = np.full(num_lines + 1, -1, dtype=np.int32)
        self._asked = b""
        self._order: Int32Array | None = None

    def order(self, rows: Int32Array) -> Int32Array | None:
        """Return, for each of r lines, the index of its row in `rows` [r]; None if they are in this order already."""
        asked = rows.tobytes()
        if asked != self._asked:
            order = self._arrange(rows)
            self._asked, self._order = asked, None if (order[1:] > order[:-1]).all() else order
        return self._order

    def _arrange(self, rows: Int32Array) -> Int32Array:
        """Keep rows on their lines if these are among the first r; put the others on free lines, in order."""
        num_rows, num_lines = len(rows), len(self._rows) - 1
        line_of: Int32Array = np.full(num_lines + 1, -1, dtype=np.int32)
        line_of[self._rows[:-1]] = np.arange(num_lines, dtype=np.int32)
        line_of[-1] = -1
        lines = line_of[rows]
        stays = (lines >= 0) & (lines < num_rows)
        order: Int32Array = np.full(num_rows, -1, dtype=np.int32)
        order[lines[stays]] = stays.nonzero()[0]
        order[order < 0] = (~stays).nonzero()[0]
        self._rows[lines[~stays]] = -1
        self._rows[:num_rows] = rows[order]
        return order


NONE: Int32Array = np.empty(0, dtype=np.int32)


class DispatchRows(NamedTuple):
    """The rows of a plan in one dispatch, all int32 [r].

    counts: tokens to compute, including drafts; computed: the position of the first.
    drafts: how many of the last tokens are drafts; None if no row has drafts.
    samples: indices in [0, r) of rows that sample; pending: of rows whose last step is in flight.
    prompt_spans: the prompt tokens whose log-probabilities are returned.
    """

    kind: DispatchKind
    rows: Int32Array
    counts: Int32Array
    computed: Int32Array
    samples: Int32Array
    drafts: Int32Array | None
    pending: Int32Array
    prompt_spans: Sequence[PromptSpan]


class DispatchLayout:
    """Owns one StepBuffers and its packed copies of the rows' block tables. Returns views of the buffers."""

    def __init__(self, groups: Sequence[KVCacheGroupSpec], buffers: StepBuffers, padded_rows: Sequence[int]) -> None:
        self._sizes = [group.block_size for group in groups]
        self._buffers = buffers
        self._padded_rows = padded_rows
        self.copies = [PackedTable(table) for table in buffers.block_tables]
        self.lines = Lines(len(buffers.rows))
        self._offsets: Int32Array = np.arange(len(buffers.token_ids), dtype=np.int32)

    def fill(
        self, part: DispatchRows, tokens: Int32Array, tables: Sequence[RowTables], fresh: tuple[Int32Array, ...]
    ) -> StepInputs:
        """Lay out `part`. `tokens` [R, max_model_len] has the tokens of all rows."""
        buffers, rows, counts = self._buffers, part.rows, part.counts
        num_rows = len(rows)
        starts = buffers.query_start[: num_rows + 1]
        counts.cumsum(out=starts[1:])
        num_tokens = int(starts[-1])
        positions, token_ids = buffers.positions[:num_tokens], buffers.token_ids[:num_tokens]
        if num_tokens == num_rows:
            owner = rows
            positions[:] = part.computed
        else:
            owner = rows.repeat(counts)
            np.add(self._offsets[:num_tokens], (part.computed - starts[:-1]).repeat(counts), out=positions)
        token_ids[:] = tokens[owner, positions]
        ends = buffers.context_lens[:num_rows]
        np.add(part.computed, counts, out=ends)
        for g, table in enumerate(tables):
            self._slots(g, table, owner, positions)
        padded = self._pad(part.kind, num_rows, num_tokens)
        num_tokens += padded - num_rows
        pairs = zip(self.copies, tables, strict=True)
        find_rows = self._with_prompt_rows if part.prompt_spans else self._logits_rows
        return StepInputs(
            token_ids=buffers.token_ids[:num_tokens],
            positions=buffers.positions[:num_tokens],
            query_start=buffers.query_start[: padded + 1],
            context_lens=buffers.context_lens[:padded],
            logits_rows=find_rows(part, starts),
            slot_mapping=tuple(slots[:num_tokens] for slots in buffers.slot_mapping),
            block_tables=tuple(copy.pack_rows(table, rows, padded) for copy, table in pairs),
            fresh_blocks=fresh,
            kind=part.kind,
            num_rows=num_rows,
            rows=_padded(buffers.rows, rows, padded, -1),
            num_drafts=NONE if part.drafts is None else _padded(buffers.num_drafts, part.drafts, padded, 0),
            pending=part.pending,
        )

    def _slots(self, g: int, table: RowTables, owner: Int32Array, positions: Int32Array) -> None:
        """Write slot = (block id - i) * block_size + position for each token, which is in block i of its row."""
        slots = self._buffers.slot_mapping[g][: len(positions)]
        index = positions // self._sizes[g]
        np.subtract(table.blocks[owner, index], index, out=slots)
        slots *= self._sizes[g]
        slots += positions

    def _pad(self, kind: DispatchKind, num_rows: int, num_tokens: int) -> int:
        """Add rows with one token each, in the null block, up to a row count of the program. Return that count."""
        if kind != "decode" or not self._padded_rows:
            return num_rows
        padded = next(count for count in self._padded_rows if count >= num_rows)
        buffers, tokens = self._buffers, slice(num_tokens, num_tokens + padded - num_rows)
        buffers.token_ids[tokens] = buffers.positions[tokens] = 0
        for slots in buffers.slot_mapping:
            slots[tokens] = 0
        buffers.context_lens[num_rows:padded] = 1
        buffers.query_start[num_rows + 1 : padded + 1] = np.arange(num_tokens + 1, tokens.stop + 1)
        return padded

    def _logits_rows(self, part: DispatchRows, starts: Int32Array) -> Int32Array:
        """Return the indices of tokens whose logits are needed: the last `1 + drafts` of each sampling row."""
        ends = starts[1:]
        if len(part.samples) < len(ends):
            ends = ends[part.samples]
        if part.drafts is None:
            found = self._buffers.logits_rows[: len(ends)]
            np.subtract(ends, 1, out=found)
            return found
        widths = 1 + part.drafts[part.samples]
        found = self._buffers.logits_rows[: int(widths.sum())]
        np.add((ends - widths.cumsum()).repeat(widths), self._offsets[: len(found)], out=found)
        return found

    def _with_prompt_rows(self, part: DispatchRows, starts: Int32Array) -> Int32Array:
        """Return the indices of `_logits_rows`, then the tokens of the prompt spans."""
        sampling = len(self._logits_rows(part, starts))
        found = self._buffers.logits_rows[: sampling + num_logits(part.prompt_spans)]
        found[sampling:] = logits_rows(part.prompt_spans, starts)
        return found


def _padded(buffer: Int32Array, values: Int32Array, padded: int, filler: int) -> Int32Array:
    """Write `values` to `buffer`, then `filler` up to length `padded`. Return a view of them."""
    found = buffer[:padded]
    found[: len(values)] = values
    if len(values) < padded:
        found[len(values) :] = filler
    return found
