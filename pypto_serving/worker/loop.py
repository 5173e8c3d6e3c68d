"""Run the worker's loop over any channel: receive plans, send results; when idle, send heartbeats, prefault memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pypto_serving.ipc import Channel
from pypto_serving.kernels import populate
from pypto_serving.types.arrays import BlockBytes
from pypto_serving.types.kv import KVCacheGroupSpec
from pypto_serving.types.step import StopWorker, ToWorker, WorkerHeartbeat, WorkerHello
from pypto_serving.util import ceil_div
from pypto_serving.worker.layout import RowTables
from pypto_serving.worker.runner import PlanExecutor

QUIET_S, PAUSE_S = 0.25, 0.005
"""Seconds without a message after which the worker is idle, and after which it continues to prefault."""
PREFAULT_TOKENS = 8192
"""Keep memory ready for the blocks of this many tokens after the highest used block."""
PREFAULT_BYTES = 4 << 20
"""Memory to prefault at once; a request or load that arrives meanwhile must wait for it."""


def serve(
    channel: Channel[ToWorker],
    hello: WorkerHello,
    runner: PlanExecutor,
    heartbeat_s: float,
    step_done: Callable[[int], None] = lambda step_id: None,
    idle: Callable[[], bool] = lambda: False,
) -> None:
    """Send `hello`, then execute plans in order until told to stop. Call `step_done` after each step.

    Collect a step when the program can hold no more, or when no message waits. When there is nothing to do, call
    `idle`, which does a part of the background work and returns whether more is left.
    """
    patience_s = QUIET_S

    def finish() -> None:
        result = runner.collect_result()
        channel.send(result)
        step_done(result.step_id)

    def wait_s() -> float:
        return 0.0 if runner.num_in_flight else min(patience_s, heartbeat_s)

    channel.send(hello)
    while not isinstance(message := channel.receive(wait_s()), StopWorker):
        if message is not None:
            runner.submit_plan(message)
            patience_s = QUIET_S
        elif not runner.num_in_flight:
            patience_s = PAUSE_S if idle() else heartbeat_s
            channel.send(WorkerHeartbeat(hello.epoch))
        if runner.num_in_flight and (message is None or runner.is_full):
            finish()
    while runner.num_in_flight:
        finish()


class Prefault:
    """Prefaults memory of `arenas`, uint8 [blocks, block_bytes] per group, ahead of the block tables `tables`.

    The system zeroes a page at the first write, and a virtual machine may have to get it from its host; a step that
    fills new blocks would wait for that. Blocks are used in order of their ids, so memory after the highest one is
    prefaulted, and a server takes only this much more than it uses.
    """

    def __init__(
        self, arenas: Sequence[BlockBytes], groups: Sequence[KVCacheGroupSpec], tables: Sequence[RowTables]
    ) -> None:
        self._groups = list(zip(arenas, groups, tables, strict=True))
        self._ends = [0] * len(self._groups)

    def __call__(self) -> bool:
        """Prefault the next piece; return whether one was missing."""
        for g, (arena, group, table) in enumerate(self._groups):
            used = 1 + int(table.blocks.max())
            begin = max(self._ends[g], used)
            end = min(len(arena), used + ceil_div(PREFAULT_TOKENS, group.block_size))
            if begin < end:
                end = min(end, begin + max(1, PREFAULT_BYTES // arena.shape[1]))
                self._ends[g] = end if populate(arena[begin:end].reshape(-1)) else len(arena)
                return True
        return False
