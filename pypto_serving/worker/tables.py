"""RowTables and PackedTable: block tables of a worker's rows, and their packed copies in dispatch buffers."""

from __future__ import annotations

import numpy as np

from pypto_serving.types.arrays import Int32Array


class RowTables:
    """Owns the block tables of all rows in one group: row i has the first `lengths[i]` ids of `blocks[i]`, [R, n]."""

    def __init__(self, rows: int, copies: list[PackedTable]) -> None:
        self.blocks: Int32Array = np.zeros((rows, copies[0].width), dtype=np.int32)
        self.lengths: Int32Array = np.zeros(rows, dtype=np.int32)
        self._copies = copies

    def set(self, row: int, blocks: Int32Array) -> None:
        """Set the block table of a new row."""
        self.blocks[row, : len(blocks)] = blocks
        self.lengths[row] = len(blocks)
        for copy in self._copies:
            copy.forget(row)

    def append(self, pairs: list[list[int]]) -> None:
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

    def forget(self, row: int) -> None:
        """Copy the whole table of `row` next time, since the row has a new request."""
        self._owner[self._owner == row] = -1

    def pack(self, tables: RowTables, rows: Int32Array, padded: int) -> Int32Array:
        """Copy the tables of `rows` [r], then null blocks up to `padded` rows. Return a view as wide as the longest."""
        num_rows = len(rows)
        owner, copied, lengths = self._owner[:num_rows], self._copied[:num_rows], tables.lengths[rows]
        copied[owner != rows] = 0
        for place in (copied != lengths).nonzero()[0].tolist():
            entries = slice(copied[place], lengths[place])
            self._buffer[place, entries] = tables.blocks[rows[place], entries]
        owner[:], copied[:] = rows, lengths
        if padded > num_rows:
            self._owner[num_rows:padded] = -1
            self._buffer[num_rows:padded, 0] = 0
        return self._buffer[:padded, : lengths.max(initial=0)]
