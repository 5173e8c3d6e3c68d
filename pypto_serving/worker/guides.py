"""RowGuides: the guides of a worker's rows, and the threads that follow outputs while the next step is computed."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import NamedTuple

from pypto_serving.errors import RequestError, RequestFailedError
from pypto_serving.types.arrays import Int32Array
from pypto_serving.types.guide import Grammar
from pypto_serving.types.sampling import RowSampling
from pypto_serving.types.tokens import id_list
from pypto_serving.worker.grammars import Grammars
from pypto_serving.worker.masks import RowMasks
from pypto_serving.worker.row_guide import RowGuide

NUM_COMPILERS = 2
MAX_FOLLOWERS = 4
"""Threads that compile grammars, and threads that follow outputs."""
PATIENCE_S = 0.01
"""How long a step waits at its end for guides that follow their rows. A row without what it needs is computed again."""
IDLE_PATIENCE_S = 0.05
"""How long a step waits that can sample no row at all."""
_CPUS = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
"""Those of the process when it imports this module, before a backend pins its main thread."""


class Told(NamedTuple):
    """What guides say of the n rows that sample, by index.

    - `guides`: of the rows that have one.
    - `withheld`: rows that cannot sample yet.
    - `forced`: what a row appends in place of a sampled token.
    - `faults`: why a row cannot go on.
    """

    guides: dict[int, RowGuide]
    withheld: set[int]
    forced: dict[int, tuple[int, ...]]
    faults: dict[int, RequestError]


class RowGuides:
    """Owns the guides of rows. Rows without one cost nothing.

    A guide is either with a thread, which compiles its grammar or appends what its row appended, or it is ready: then
    it says what its row may choose next. `_busy` has those with a thread, `_ready` those that came back.
    """

    def __init__(self, grammars: Grammars, masks: RowMasks) -> None:
        self._grammars = grammars
        self._masks = masks
        self._rows: dict[int, RowGuide] = {}
        self._busy: set[RowGuide] = set()
        self._compiling: set[RowGuide] = set()
        self._ready: SimpleQueue[RowGuide] = SimpleQueue()
        self._todo: deque[tuple[RowGuide, Sequence[int]]] = deque()
        self._num_followers = min(MAX_FOLLOWERS, len(_CPUS) or 1)
        self._compilers = ThreadPoolExecutor(NUM_COMPILERS, "compile-grammar", _leave_pinned_cpu)
        self._followers = ThreadPoolExecutor(self._num_followers, "follow-output", _leave_pinned_cpu)

    def start(self, row: int, sampling: RowSampling, output: Sequence[int]) -> None:
        """Guide `row`, which has the tokens `output` already."""
        assert sampling.guide is not None
        grammar, eos_ids = sampling.guide.grammar, id_list(sampling.eos_ids)
        guide = RowGuide(sampling.guide, eos_ids, jumps=sampling.num_logprobs < 0)
        self._rows[row] = guide
        self._busy.add(guide)
        start = None if grammar is None else self._grammars.find(grammar, eos_ids)
        if start is not None or (grammar is None and self._grammars.is_prepared):
            guide.open(start, self._grammars.num_words, self._grammars.texts(eos_ids))
            self._todo.append((guide, output))
            self._start_followers(1)
        else:
            self._compiling.add(guide)
            self._compilers.submit(self._compile, guide, grammar, output)

    def clear(self, row: int) -> None:
        """Forget the guide of `row`; a thread may still be at work for it."""
        self._rows.pop(row, None)

    def tell(self, rows: Int32Array) -> Told | None:
        """Say what `rows` [n], which sample now, may choose, and set their masks. Wait a little for threads.

        None if no row has a guide.
        """
        if not self._rows:
            return None
        found = {i: guide for i, row in enumerate(rows.tolist()) if (guide := self._rows.get(row)) is not None}
        if not found:
            return None
        self._wait({guide for guide in found.values() if guide in self._busy}, len(rows))
        told = Told(found, set(), {}, {})
        for i, guide in found.items():
            mask = None
            if guide in self._busy:
                told.withheld.add(i)
            elif guide.fault is not None:
                told.faults[i] = guide.fault
            elif guide.forced:
                told.forced[i] = guide.forced
            else:
                mask = guide.mask
            row = int(rows[i])
            self._masks.put(row, 0, None if mask is None else mask[: self._masks.bits.shape[1]])
            if guide.is_done:
                del self._rows[row]
        return told

    def _wait(self, wanted: set[RowGuide], num_rows: int) -> None:
        """Take back guides that are ready, and wait for `wanted`: longer if the step has no other row to sample."""
        idle = len(wanted) == num_rows
        until_s = time.monotonic() + (IDLE_PATIENCE_S if idle else PATIENCE_S)
        while True:
            waits = wanted if idle else wanted - self._compiling
            try:
                guide = self._ready.get(timeout=max(0.0, until_s - time.monotonic()) if waits else 0.0)
            except Empty:
                return
            self._busy.discard(guide)
            self._compiling.discard(guide)
            if guide in wanted:
                wanted.discard(guide)
                idle, until_s = False, min(until_s, time.monotonic() + PATIENCE_S)

    def follow(self, rows: Int32Array, told: Told, counts: Int32Array, token_ids: Int32Array) -> None:
        """Hand to threads what `rows` [n] appended: `counts` [n] of `token_ids`, row after row."""
        ends, given = counts.cumsum(), 0
        for i, guide in told.guides.items():
            if counts[i] and self._rows.get(int(rows[i])) is guide:
                self._busy.add(guide)
                self._todo.append((guide, token_ids[ends[i] - counts[i] : ends[i]].tolist()))
                given += 1
        self._start_followers(given)

    def _start_followers(self, count: int) -> None:
        for _ in range(min(count, self._num_followers)):
            self._followers.submit(self._follow)

    # In threads.

    def _follow(self) -> None:
        while self._todo:
            try:
                guide, token_ids = self._todo.popleft()
            except IndexError:
                return
            self._advance(guide, token_ids)

    def _compile(self, guide: RowGuide, grammar: Grammar | None, output: Sequence[int]) -> None:
        try:
            start = None if grammar is None else self._grammars.compile(grammar, guide.eos_ids)
            texts = self._grammars.texts(guide.eos_ids)
            guide.open(start, self._grammars.num_words, texts)
        except BaseException as error:
            guide.fault = _fault(error)
            self._ready.put(guide)
        else:
            self._advance(guide, output)

    def _advance(self, guide: RowGuide, token_ids: Sequence[int]) -> None:
        try:
            before = list(guide.output)
            guide.advance(token_ids)
            if guide.fault is not None and guide.guide.grammar is not None:
                self._start_over(guide, guide.guide.grammar, before, token_ids)
        except BaseException as error:
            guide.fault = _fault(error)
        self._ready.put(guide)

    def _start_over(self, guide: RowGuide, grammar: Grammar, before: Sequence[int], token_ids: Sequence[int]) -> None:
        """Let a guide that failed try the same step without what others learned of its grammar."""
        texts = self._grammars.texts(guide.eos_ids)
        guide.open(self._grammars.renew(grammar, guide.eos_ids), self._grammars.num_words, texts)
        guide.advance(before)
        guide.advance(token_ids)


def _fault(error: BaseException) -> RequestError:
    """Return the error of a request; whatever else a thread met, such as a panic of llguidance, ends no more."""
    if isinstance(error, RequestError):
        return error
    return RequestFailedError(f"the grammar could not be followed: {str(error)[:200]}")


def _leave_pinned_cpu() -> None:
    """Let a new thread run on all CPUs of the process; it begins on those of the thread that started it."""
    if _CPUS:
        os.sched_setaffinity(0, _CPUS)
