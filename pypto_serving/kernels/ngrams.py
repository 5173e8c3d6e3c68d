"""NgramDrafter: propose the tokens that followed an earlier occurrence of a row's last tokens (csrc/ngrams.h)."""

from __future__ import annotations

import numpy as np

from pypto_serving.errors import ConfigError
from pypto_serving.kernels.abi import Handle, LibraryObject, library
from pypto_serving.types.arrays import Float32Array, Int32Array


class NgramDrafter(LibraryObject):
    """Owns an index of the tokens of R rows, updated by `propose`. Implements Drafter for any model.

    The longest match wins; among equally long ones, the newest. The odds are computed from all proposals, including
    unverified ones, so a row that starts or stops repeating itself is noticed at no cost.
    """

    drop = "drop_ngrams"

    def __init__(self, rows: int, shortest: int, longest: int) -> None:
        """Match at least the last `shortest` tokens; matches longer than `longest` count as equally good.

        Raises ConfigError if the package was built without its kernels.
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

        Return, per row, the number of drafts, and the probability that a draft is right if all drafts before it are.
        """
        counts, odds = np.zeros(len(rows), np.int32), np.zeros(len(rows), np.float32)
        wanted = np.ascontiguousarray(rows), np.ascontiguousarray(known), np.ascontiguousarray(most)
        self._lib.propose_ngrams(self.handle, tokens, tokens.shape[1], len(rows), *wanted, counts, odds)
        return counts, odds
