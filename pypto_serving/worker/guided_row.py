"""GuidedRow: a row with a guide, and the last answer of that guide."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus

import numpy as np

from pypto_serving.errors import RequestError
from pypto_serving.types.sampler import MaskArray
from pypto_serving.types.sampling import RowSampling
from pypto_serving.worker.guiding.wire import Pace
from pypto_serving.worker.row_guide import NextTokens

NOTHING: MaskArray = np.empty((0, 0), np.uint32)
"""No mask after a draft."""


class GuidedRow:
    """Owned by RowGuides.

    - `life`: names it to the process that follows it; 0 if none does yet.
    - `choice`: what the row may append next; None until its process answers.
    - `ahead` [n, words]: the masks after the first n of its drafts; None until its process answers.
    - `expected`: what must follow the last token, as far as that was known before it.
    - `fault`: why it cannot go on, or None.
    - `pace`: of its grammar, as its process reported it last.
    - `unwaited`: no step waits for this many of its next tokens.
    - `lateness`: how many these were after its last late answer; 0 if it has been in time since.
    - `num_crashes`: how many processes ended while they worked for it.
    """

    def __init__(self, row: int, sampling: RowSampling, output: Sequence[int]) -> None:
        assert sampling.guide is not None
        self.life = 0
        self.row = row
        self.guide = sampling.guide
        self.eos_ids = sampling.eos_ids
        self.jumps = sampling.num_logprobs < 0
        self.output = list(output)
        self.choice: NextTokens | None = None
        self.ahead: MaskArray | None = NOTHING
        self.expected: tuple[int, ...] = ()
        self.fault: RequestError | None = None
        self.pace: Pace = "new"
        self.unwaited = 1
        self.lateness = 0
        self.num_crashes = 0

    @property
    def is_busy(self) -> bool:
        return (self.choice is None or self.ahead is None) and self.fault is None

    @property
    def is_waited_for(self) -> bool:
        """Return whether a step with other rows waits for the choice."""
        return not self.unwaited and self.pace != "slow"

    def append(self, token_ids: Sequence[int]) -> None:
        """Append what the row appended. Of what follows only the rest of expected tokens is known."""
        expected, count = () if self.choice is None else self.choice.expected, len(token_ids)
        self.expected = expected[count:] if expected[:count] == tuple(token_ids) else ()
        self.choice, self.ahead = None, NOTHING
        self.output += token_ids

    def fail(self, error: RequestError) -> None:
        """Fail the row. If that is due to its grammar, name the field of the request that it is from."""
        self.fault = error
        if error.status < HTTPStatus.INTERNAL_SERVER_ERROR and self.guide.grammar is not None:
            self.fault = RequestError(f"{self.guide.field}: {error}", param=self.guide.field, code=error.error_code)
            self.fault.status = error.status
