"""The ranks of one program on this host: what they share, and how the leader starts and watches the others.

The leader is the worker. The others are its children (`rank.py`): they load their parts of the model at the same time,
then replay the steps that the leader publishes. When one ends, the leader ends; when the leader ends, all do.
"""

from __future__ import annotations

import os
import select
import threading

from pypto_serving.backend.base import Fault, Progress, StepBuffers, StepInputs
from pypto_serving.errors import EXIT_MODEL, EXIT_USAGE, ConfigError, ModelError, PyptoError
from pypto_serving.ipc import Child, ChildFault
from pypto_serving.kernels import Board, Peers, Recording, SharedMemory
from pypto_serving.parallel.topology import Rank
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.start import RankStart

MODULE = "pypto_serving.backend.rank"
LOADING, READY = "weights", "ready"
"""Phases: the one in which all ranks load, and what a rank reports when it can follow."""

PATIENCE_S = 1.0


class RankError(PyptoError):
    """A rank that ended, without saying why."""


class Shared:
    """Owns a rank's mappings of what all ranks share; each of them allocates the same, in the same order."""

    def __init__(self, config: EngineConfig, rank: Rank, memory: SharedMemory) -> None:
        self.memory, self._board = memory, Board(memory)
        limits = config.limits
        held = range(limits.held_dispatches)
        self.buffers = [StepBuffers.in_host_memory(config.groups, limits, memory.zeros) for _ in held]
        self._places = {_address(buffers): place for place, buffers in enumerate(self.buffers)}
        self.peers = Peers(rank.tensor, rank.topology.tensor, memory, rank.stage, rank.topology.pipeline, len(held))

    def publish(self, inputs: StepInputs) -> int:
        """Let all ranks compute a step, whose arrays begin those of one of `buffers`; return which."""
        place = self._places[_address(inputs)]
        self._board.publish(place, len(inputs.token_ids), len(inputs.context_lens), len(inputs.logits_rows))
        return place

    def follow(self, step: Recording) -> None:
        """Replay `step` for every step that the leader publishes."""
        self._board.follow(
            step,
            [
                (b.token_ids, b.positions, b.query_start, b.context_lens, b.logits_rows, b.slot_mapping, b.block_tables)
                for b in self.buffers
            ],
        )


def _address(arrays: StepBuffers | StepInputs) -> int:
    return int(arrays.token_ids.ctypes.data)


class Followers:
    """Owns the processes of all ranks but the leader's."""

    def __init__(self, config: EngineConfig, memory: SharedMemory, descendants: tuple[int, ...] = ()) -> None:
        """Start them; they inherit `descendants`. Raises RankError where the system cannot."""
        self._children: dict[int, Child] = {}
        self._loaded: dict[int, float] = {}
        self._ready: set[int] = set()
        self._total = 0
        for rank in config.topology.ranks[1:]:
            start = RankStart(config, rank.index, memory.fd)
            try:
                self._children[rank.index] = Child(MODULE, start, shared=(memory.fd, *descendants))
            except OSError as error:
                raise RankError(f"rank {rank.index} cannot be started ({error})") from None
            self._loaded[rank.index] = 0.0

    def reporting(self, progress: Progress) -> Progress:
        """Return what the leader reports to: it tells `progress` how far the slowest rank is.

        It raises ModelError, ConfigError or RankError as soon as a rank has failed.
        """

        def report(phase: str, done: int, total: int) -> None:
            self._hear()
            if phase == LOADING:
                self._total = total
                done = min(done, self._slowest())
            progress(phase, done, total)

        return report

    def _slowest(self) -> int:
        """Return how much of the leader's total each rank has loaded at least, by its share of its own."""
        return int(self._total * min(self._loaded.values()))

    def await_ready(self, progress: Progress) -> None:
        """Wait until all can follow; raises as `reporting` says."""
        while len(self._ready) < len(self._children):
            self._sleep()
            self._hear()
            progress(LOADING, self._slowest(), self._total)

    def _hear(self) -> None:
        for rank, child in self._children.items():
            for message in child.messages():
                if isinstance(message, ChildFault):
                    raise _error(message)
                self._loaded[rank] = 1.0 if message.phase == READY else message.done / max(1, message.total)
                if message.phase == READY:
                    self._ready.add(rank)
            if child.gone:
                raise RankError(f"rank {rank} ended (exit code {child.end(PATIENCE_S)})")

    def _sleep(self) -> None:
        """Wait until a rank says something, or ends."""
        poller = select.poll()
        for child in self._children.values():
            poller.register(child.pipe, select.POLLIN)
        poller.poll()

    def watch(self, fault: Fault) -> None:
        """When a rank ends, report a fault and end this process: its threads may wait for that rank in a step."""
        threading.Thread(target=self._watch, args=(fault,), name="rank-watch", daemon=True).start()

    def _watch(self, fault: Fault) -> None:
        try:
            while True:
                self._sleep()
                self._hear()
        except PyptoError as error:
            fault(str(error), error.exit_code)
            os._exit(error.exit_code)


def _error(fault: ChildFault) -> PyptoError:
    kinds: dict[int, type[PyptoError]] = {EXIT_MODEL: ModelError, EXIT_USAGE: ConfigError}
    return kinds.get(fault.exit_code, RankError)(fault.message)
