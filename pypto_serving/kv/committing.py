"""Committer: publishes the blocks of computed tokens and frees those that are not needed any more."""

from __future__ import annotations

from array import array

from pypto_serving.kv.events import EventLog
from pypto_serving.kv.resume_points import ResumePoints
from pypto_serving.kv.sequence import SequencePart, SequenceState


class Committer:
    """A part of the KVCacheManager, without state of its own: settles the tokens of sequences.

    With `caching`, blocks are published up to the last resume point. With `keeps`, those that resuming needs are kept
    for lower tiers. `events` gets their contents.
    """

    def __init__(self, points: ResumePoints, caching: bool, keeps: bool, events: EventLog | None) -> None:
        self._points = points
        self._caching = caching
        self._keeps = keeps
        self._events = events

    def commit(self, sequence: SequenceState, tokens: array[int], num_computed: int, prompt_len: int) -> None:
        """Do what `KVCacheManager.commit` does for a sequence that is due."""
        if not self._caching:
            sequence.free_passed(num_computed)
            return
        end = min(num_computed, len(tokens) - self._points.lag)
        if sequence.committed >= end:
            return
        start, position = self._points.last(sequence.committed), self._points.last(end)
        if position > sequence.resume_point:
            sequence.extend_keys(tokens)
            for part in sequence.parts:
                self._publish(part, sequence, tokens, start, position)
            self._pass_resume_points(sequence, start, position, prompt_len)
        sequence.free_passed(end)

    def _publish(self, part: SequencePart, sequence: SequenceState, tokens: array[int], start: int, end: int) -> None:
        """Publish the useful blocks of one group that end in (start, end], between two resume points."""
        keys, table, pool = part.keys, part.table, part.group.pool
        keep = self._keeps and part.group.keeps_history
        for i in part.group.useful(start, end):
            pool.publish(table[i], keys[i])
            if keep:
                pool.keep(table[i])
            if self._events is not None:
                part.describe(i, tokens, sequence.salted, self._events)

    def _pass_resume_points(self, sequence: SequenceState, start: int, end: int, prompt_len: int) -> None:
        """Keep the tails of windows and states that settling (start, end], between two resume points, makes useful.

        1. At each checkpoint: have the tail stored in lower tiers once nobody refers to it.
        2. At `end`: hold the tail, instead of the one held before.
        """
        if sequence.recent and self._keeps:
            for position in self._points.checkpoints(start, end, prompt_len):
                self.keep_resume_blocks(sequence, position)
        sequence.resume_point = end
        for part in sequence.recent:
            part.hold(end)

    def keep_resume_blocks(self, sequence: SequenceState, position: int) -> None:
        """Have the tails of a settled position stored in lower tiers once nobody refers to them."""
        for part in sequence.recent if self._keeps else ():
            for block_id in part.resume_blocks_at(position):
                part.group.pool.keep(block_id)
