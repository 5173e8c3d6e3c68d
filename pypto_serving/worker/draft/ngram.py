"""NgramDrafter: propose what followed the last tokens of a row where they stood before, in prompt or output."""

from __future__ import annotations

from pypto_serving.backend.base import Proposals
from pypto_serving.kernels import Ngrams
from pypto_serving.types.arrays import Int32Array
from pypto_serving.types.drafts import NgramConfig


class NgramDrafter:
    """Implements Drafter for any model. The longest match wins; among equals the newest.

    Looked up natively: 6 us a call and 0.1 ms for a prompt of 32,000 tokens, which take 15 ms in Python.

    Its odds come from all of its proposals, those that were not verified too, so a row that begins or ends to repeat is
    noticed at no cost.
    """

    def __init__(self, max_rows: int, config: NgramConfig) -> None:
        self._ngrams = Ngrams(max_rows, config.shortest, config.longest)

    def start(self, row: int) -> None:
        """Forget the tokens of `row`."""
        self._ngrams.start(row)

    def propose(self, tokens: Int32Array, rows: Int32Array, known: Int32Array, most: Int32Array) -> Proposals:
        """Implement Drafter."""
        return Proposals(*self._ngrams.propose(tokens, rows, known, most))
