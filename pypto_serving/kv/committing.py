"""Committer: publishes the blocks of computed tokens, and frees those that are not needed any more."""

from __future__ import annotations

from array import array

from pypto_serving.kv.block_table import BlockTable, SequenceState
from pypto_serving.kv.events import EventLog
from pypto_serving.kv.group import ResumePoints


class Committer:
    """A part of the KVCacheManager, without state of its own: commits the tokens of sequences.

    With `caching`, blocks are published up to the last resume point. With `keeps`, those that resuming needs are kept
    for lower tiers. `events` gets the contents of blocks.
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
            for table in sequence.tables:
                self._publish(table, sequence, tokens, start, position)
            self._pass_resume_points(sequence, start, position, prompt_len)
        sequence.free_passed(end)

    def _publish(self, table: BlockTable, sequence: SequenceState, tokens: array[int], start: int, end: int) -> None:
        """Publish the useful blocks of one group that end in (start, end], between two resume points."""
        keys, blocks, pool = table.keys, table.blocks, table.group.pool
        keep = self._keeps and table.group.keeps_history
        for i in table.group.useful(start, end):
            pool.publish(blocks[i], keys[i])
            if keep:
                pool.keep(blocks[i])
            if self._events is not None:
                table.describe(i, tokens, sequence.salted, self._events)

    def _pass_resume_points(self, sequence: SequenceState, start: int, end: int, prompt_len: int) -> None:
        """Keep the resume blocks of windows and states in (start, end], between two resume points.

        1. At each checkpoint: have them stored in lower tiers once nobody refers to them.
        2. At `end`: hold them, instead of those held before.
        """
        if sequence.recent and self._keeps:
            for position in self._points.checkpoints(start, end, prompt_len):
                self.keep_resume_blocks(sequence, position)
        sequence.resume_point = end
        for table in sequence.recent:
            table.hold_resume_blocks(end)

    def keep_resume_blocks(self, sequence: SequenceState, position: int) -> None:
        """Have the resume blocks of a committed position stored in lower tiers once nobody refers to them."""
        for table in sequence.recent if self._keeps else ():
            for block_id in table.resume_blocks_at(position):
                table.group.pool.keep(block_id)
