"""RowTables, PackedTable and Lines: block tables of a worker's rows, and where dispatch buffers have copies of them."""

from __future__ import annotations

import numpy as np

from pypto_serving.types.arrays import Int32Array


class RowTables:
    """Owns the block tables of all rows in one group: row i has the first `lengths[i]` ids of `blocks[i]`, [R, n]."""

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

    If a line of the buffer had the same row in the dispatch before, only the new ids are copied.
    """

    def __init__(self, buffer: Int32Array) -> None:
        self.width = buffer.shape[1]
        self._buffer = buffer
        self._owner: Int32Array = np.full(len(buffer), -1, dtype=np.int32)
        self._copied: Int32Array = np.zeros(len(buffer), dtype=np.int32)

    def forget_row(self, row: int) -> None:
        """Copy the whole table of `row` next time, since the row has a new request."""
        self._owner[self._owner == row] = -1

    def pack_rows(self, tables: RowTables, rows: Int32Array, padded: int) -> Int32Array:
        """Copy the tables of `rows` [r], then null blocks up to `padded` rows. Return a view as wide as the longest."""
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
    """Owns the order of rows in one dispatch's buffers: a row keeps its line, so that its tables stay copied.

    The line of a row that leaves goes to a new row, or to the row on the last line.
    """

    def __init__(self, num_lines: int) -> None:
        # One more entry than there are lines: -1, which stands for no row and no line, indexes it.
        self._rows: Int32Array = np.full(num_lines + 1, -1, dtype=np.int32)
        self._asked = b""
        self._order: Int32Array | None = None

    def order(self, rows: Int32Array) -> Int32Array | None:
        """Return the index into `rows` [r] of the row on each of r lines; None if they are in this order already."""
        asked = rows.tobytes()
        if asked != self._asked:
            order = self._arrange(rows)
            self._asked, self._order = asked, None if (order[1:] > order[:-1]).all() else order
        return self._order

    def _arrange(self, rows: Int32Array) -> Int32Array:
        """Leave rows on their lines if these are among the first r, and put the others on free ones, in order."""
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
