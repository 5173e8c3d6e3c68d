"""NgramDrafter: propose what followed the last tokens of a row before, in prompt or output (csrc/ngrams.h)."""

from __future__ import annotations

import numpy as np

from pypto_serving.errors import ConfigError
from pypto_serving.kernels.abi import Handle, LibraryObject, library
from pypto_serving.types.arrays import Float32Array, Int32Array


class NgramDrafter(LibraryObject):
    """Owns an index of the tokens of R rows, updated when a row is asked for. Implements Drafter for any model.

    The longest match wins; among equals the newest. The odds come from all proposals, also from those that were not
    verified, so a row that begins or ends to repeat is noticed at no cost.
    """

    drop = "drop_ngrams"

    def __init__(self, rows: int, shortest: int, longest: int) -> None:
        """Match at least the `shortest` number of last tokens; beyond `longest` no match is better than another.

        Raises ConfigError where the package was built without its kernels.
        """
        if library() is None:
            raise ConfigError("the package was built without the CPU kernels, which look n-grams up")
        super().__init__()
        self.handle: Handle = self._lib.ngrams(rows, shortest, longest)

    def start_row(self, row: int) -> None:
        """Forget the tokens of `row`."""
        self._lib.start_ngrams(self.handle, row)

    def propose(
        self, tokens: Int32Array, rows: Int32Array, known: Int32Array, most: Int32Array
    ) -> tuple[Int32Array, Float32Array]:
        """Write at most `most` [n] drafts after the `known` [n] tokens of `rows` [n], in `tokens` [R, width].

        Return how many each row got, and how probable it is that such a draft is right if those before it are.
        """
        counts, odds = np.zeros(len(rows), np.int32), np.zeros(len(rows), np.float32)
        wanted = np.ascontiguousarray(rows), np.ascontiguousarray(known), np.ascontiguousarray(most)
        self._lib.propose_ngrams(self.handle, tokens, tokens.shape[1], len(rows), *wanted, counts, odds)
        return counts, odds
