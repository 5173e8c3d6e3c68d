"""RowGuides: the guides of a worker's rows, followed by a separate process while the next step is computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pypto_serving.errors import RequestError
from pypto_serving.limits import TOKEN_S
from pypto_serving.types.arrays import Int32Array
from pypto_serving.types.sampling import RowSampling
from pypto_serving.worker.guide_client import NOTHING, GuideClient, GuidedRow, GuideProcess
from pypto_serving.worker.masks import RowMasks

PATIENCE_S = 0.01
"""Limit of a step's wait for late guides if any of its rows is ready. A row whose guide has not answered is computed
again."""
WAIT_SHARE = 0.1
"""Limit of the share of time spent waiting for guides in steps that also have rows without a guide."""


class StepConstraints(NamedTuple):
    """Constraints by guides on the n sampling rows, by index.

    - `guides`: guides of the rows that have one.
    - `withheld`: rows that cannot sample yet.
    - `forced`: tokens that a row appends instead of a sampled one.
    - `faults`: errors that end rows.
    - `known_drafts`: number of a row's drafts after which the allowed tokens are known.
    """

    guides: dict[int, GuidedRow]
    withheld: set[int]
    forced: dict[int, tuple[int, ...]]
    faults: dict[int, RequestError]
    known_drafts: dict[int, int]


class RowGuides:
    """Owns the state of the guides of rows. Rows without a guide cost nothing.

    A process follows grammars. It starts with the first row that has a guide; until then `_client` is None.
    """

    def __init__(self, make_process: Callable[[], GuideProcess], masks: RowMasks) -> None:
        self._make_process = make_process
        self._masks = masks
        self._rows: dict[int, GuidedRow] = {}
        self._client: GuideClient | None = None
        self._may_wait_s = PATIENCE_S
        self._waited_s = 0.0

    def start(self, row: int, sampling: RowSampling, output: Sequence[int]) -> None:
        """Begin to guide `row`, which already has the tokens `output`."""
        if self._client is None:
            self._client = GuideClient(self._make_process())
        guided = self._rows[row] = GuidedRow(row, sampling, output)
        self._client.open(guided)

    def clear(self, row: int) -> None:
        """Forget the guide of `row`, and drop its pending work."""
        if (guided := self._rows.pop(row, None)) is not None and self._client is not None:
            self._client.drop(guided)

    def close(self) -> None:
        """End the process."""
        if self._client is not None:
            self._client.process.close()
            self._client = None

    def expected(self, rows: Int32Array) -> dict[int, tuple[int, ...]]:
        """Return, by index, the tokens that must follow the last one of `rows` [n], as far as already known."""
        if not self._rows:
            return {}
        found = ((i, self._rows.get(row)) for i, row in enumerate(rows.tolist()))
        return {i: guided.expected for i, guided in found if guided is not None and guided.expected}

    def draft(self, rows: Int32Array, known: Int32Array, counts: Int32Array, tokens: Int32Array) -> None:
        """Pass to guides the `counts` [n] drafts that `rows` [n] verify, which follow their `known` [n] in `tokens`."""
        if self._client is None or not self._rows:
            return
        for i, row in enumerate(rows.tolist()):
            if counts[i] and (guided := self._rows.get(row)) is not None:
                self._client.draft(guided, tokens[row, known[i] : known[i] + counts[i]])
        self._client.flush()

    def constrain(self, rows: Int32Array, num_drafts: Int32Array | None = None) -> StepConstraints | None:
        """Return the constraints of `rows` [n], which sample now, and set their masks. Wait a little for the process.

        A row of -1 has no guide. Row i verifies `num_drafts[i]` drafts. Return None if no row has a guide.
        """
        if self._client is None or not self._rows:
            return None
        found = {i: guided for i, row in enumerate(rows.tolist()) if (guided := self._rows.get(row)) is not None}
        if not found:
            return None
        late = [guided for guided in found.values() if guided.is_busy]
        self._wait(self._client, late, len(rows) - len(late), len(rows) > len(found))
        constraints = StepConstraints(found, set(), {}, {}, {})
        for i, guided in found.items():
            mask = None
            if guided.fault is not None:
                constraints.faults[i] = guided.fault
            elif guided.choice is None:
                constraints.withheld.add(i)
            elif guided.choice.forced:
                constraints.forced[i] = guided.choice.forced
            else:
                mask = guided.choice.mask
            self._masks.put(guided.row, 0, mask)
            if guided.choice is not None and guided.choice.is_done:
                self._masks.lift(guided.row)
                self.clear(guided.row)
            elif num_drafts is not None:
                constraints.known_drafts[i] = self._put_ahead(guided, int(num_drafts[i]))
        return constraints

    def _put_ahead(self, guided: GuidedRow, num_drafts: int) -> int:
        """Set the masks after the drafts of a row; return the number of drafts with a known mask after them."""
        ahead = NOTHING if guided.ahead is None else guided.ahead[:num_drafts]
        for draft, mask in enumerate(ahead):
            self._masks.put(guided.row, 1 + draft, mask)
        return len(ahead)

    def _wait(self, client: GuideClient, late: Sequence[GuidedRow], num_ready: int, has_others: bool) -> None:
        """Process new answers, and wait for the rows `late`. While no row is ready, wait as long as a token may take.

        Once a row is ready, wait at most PATIENCE_S. If the step has other rows, wait at most WAIT_SHARE of the time.
        """
        client.receive(0.0)
        began_s = time.monotonic()
        self._may_wait_s = min(PATIENCE_S, self._may_wait_s + WAIT_SHARE * (began_s - self._waited_s))
        until_s = began_s + (self._may_wait_s if has_others else PATIENCE_S if num_ready else TOKEN_S)
        while num_late := sum(guided.is_busy for guided in late):
            if not num_ready and num_late < len(late):
                num_ready, until_s = 1, min(until_s, time.monotonic() + PATIENCE_S)
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not client.receive(left_s):
                break
        self._waited_s = time.monotonic()
        if has_others:
            self._may_wait_s -= self._waited_s - began_s

    def append(self, rows: Int32Array, constraints: StepConstraints, counts: Int32Array, token_ids: Int32Array) -> None:
        """Record the tokens appended by `rows` [n]: `counts` [n] of `token_ids`, row after row."""
        assert self._client is not None
        ends = counts.cumsum()
        for i, guided in constraints.guides.items():
            if counts[i] and self._rows.get(guided.row) is guided:
                new = token_ids[ends[i] - counts[i] : ends[i]]
                guided.append(new.tolist())
                self._client.append(guided, new)
        self._client.flush()
