"""RowMasks: the tokens that each row may choose at its next positions."""

from __future__ import annotations

import numpy as np

from pypto_serving.types.arrays import Int32Array
from pypto_serving.types.sampler import MaskArray


class RowMasks:
    """Owns the token masks of R rows: one for a row's next token, and one after each of its drafts.

    Bit v % 32 of word v // 32 allows token v. A mask is the intersection of the one from `put` and the row's allowed
    ids, or only the former if they have no token in common. It stays until the next `put`, or until the row is cleared.
    Memory of masks that are never set is never touched.
    """

    def __init__(self, rows: int, vocab_size: int, max_drafts: int = 0) -> None:
        self._width = 1 + max_drafts
        self.bits: MaskArray = np.zeros((rows * self._width, -(-vocab_size // 32)), np.uint32)
        self._allowed: dict[int, MaskArray] = {}
        self._index: Int32Array = np.full((rows, self._width), -1, np.int32)
        self._masked: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._masked)

    def allow(self, row: int, token_ids: Int32Array) -> None:
        """Allow only `token_ids` at every position of `row`."""
        flags = np.zeros(self.bits.shape[1] * 32, np.uint8)
        flags[token_ids] = 1
        self._allowed[row] = np.packbits(flags, bitorder="little").view("<u4")
        self._masked.add(row)
        self.lift(row)

    def put(self, row: int, draft: int, mask: MaskArray | None) -> None:
        """Set the mask of the token that `row` samples after `draft` drafts; None leaves only the ids of `allow`.

        `mask` has a word for each 32 ids of the vocabulary and is copied. Must be called before the tokens are sampled
        or, if a device samples, before the dispatch is submitted.
        """
        allowed, at = self._allowed.get(row), row * self._width + draft
        if mask is not None and allowed is not None and (both := mask & allowed).any():
            mask = both
        found = allowed if mask is None else mask
        self._index[row, draft] = -1 if found is None else at
        if found is not None:
            self.bits[at] = found
            self._masked.add(row)
        elif row in self._masked and (self._index[row] < 0).all():
            self._masked.discard(row)

    def lift(self, row: int) -> None:
        """From now on, allow at every position of `row` all tokens that `allow` does not exclude."""
        for draft in range(self._width):
            self.put(row, draft, None)

    def clear(self, row: int) -> None:
        """Forget the masks of `row`."""
        if row in self._masked:
            self._masked.discard(row)
            self._allowed.pop(row, None)
            self._index[row] = -1

    def find(self, rows: Int32Array) -> Int32Array:
        """Return the indices in `bits` of the masks of `rows`, -1 for none. A row repeats once per draft."""
        drafts = np.zeros(len(rows), np.int32)
        if self._width > 1 and len(rows):
            starts = np.flatnonzero(np.append(True, rows[1:] != rows[:-1]))
            drafts = np.arange(len(rows)) - starts.repeat(np.diff(np.append(starts, len(rows))))
        found: Int32Array = self._index[rows, drafts]
        return found
