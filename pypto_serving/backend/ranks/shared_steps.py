"""Shared buffers of a step's arrays, in which the leader publishes steps to the ranks of its host."""

from __future__ import annotations

from collections.abc import Mapping

from pypto_serving.backend.base import StepBuffers, StepInputs
from pypto_serving.kernels import (
    Extent,
    Link,
    Links,
    Mirrored,
    Mirrors,
    NativeCollectives,
    RanksGone,
    ReceiveThread,
    Recording,
    SharedMemory,
    StepBoard,
)
from pypto_serving.kernels.recording import StepArrays
from pypto_serving.parallel.topology import Rank
from pypto_serving.types.config import EngineConfig

READY = "ready"
"""The phase that a rank reports when it can compute steps."""


class SharedBuffers:
    """Owns a rank's mapping of the step buffers, the first allocation of all ranks in `memory`."""

    def __init__(self, config: EngineConfig, memory: SharedMemory) -> None:
        self.memory, count = memory, range(config.num_buffers)
        self.buffers = [StepBuffers.in_host_memory(config.cache.groups, config.limits, memory.zeros) for _ in count]
        self._indices = {_address(buffers): index for index, buffers in enumerate(self.buffers)}

    def index_of(self, inputs: StepInputs) -> int:
        """Return the index in `buffers` of the buffers that hold the arrays of a step."""
        return self._indices[_address(inputs)]


class SharedSteps(SharedBuffers):
    """Owns a rank's mappings of all shared memory. Each rank makes the same allocations in the same order."""

    def __init__(self, config: EngineConfig, rank: Rank, memory: SharedMemory) -> None:
        super().__init__(config, memory)
        self._board, self._rank = StepBoard(memory), rank
        self._most_tokens, self._patience_s = config.limits.max_num_batched_tokens, config.faults.step_timeout_s
        self._steps: tuple[Link, list[Mirrors]] | ReceiveThread | None = None

    def connect(self, links: Mapping[str, int]) -> NativeCollectives:
        """Take over the rank's connections to the other host, by name, and return the collectives of all ranks."""
        ends = {name: Link(fd, self._patience_s) for name, fd in links.items() if name != "blocks"}
        if (steps := ends.get("steps")) is not None:
            mirrors = [_mirrored(buffers) for buffers in self.buffers]
            if self._rank.leads:
                self._steps = steps, [Mirrors(arrays) for arrays in mirrors]
            else:
                arrays = Mirrors([mirrored for arrays in mirrors for mirrored in arrays])
                self._steps = ReceiveThread(steps, arrays, len(mirrors), self._board.memory, publishes=True)
        return NativeCollectives(self._rank, self.memory, len(self.buffers), Links(**ends), self._most_tokens)

    def publish(self, inputs: StepInputs) -> int:
        """Make all ranks compute a step whose arrays lie in one of `buffers`; return the index of the buffers.

        Raises RanksGone if the link to the other host has failed.
        """
        index = self.index_of(inputs)
        counts = (len(inputs.token_ids), len(inputs.context_lens), len(inputs.logits_rows))
        if isinstance(self._steps, tuple):
            link, mirrors = self._steps
            if not link.send_step(mirrors[index], index, *counts):
                raise RanksGone
        self._board.publish(index, *counts)
        return index

    def replay_published(self, step: Recording, drafting: Recording | None) -> None:
        """Replay `step` for every step that the leader publishes, and `drafting` for steps of the draft layers."""
        step.replay_published(self._board.memory, [step_arrays(each) for each in self.buffers], drafting)


def step_arrays(step: StepBuffers | StepInputs) -> StepArrays:
    """Return the arrays of a step in the order in which recordings take them."""
    arrays = (step.token_ids, step.positions, step.query_start, step.context_lens, step.logits_rows)
    return (*arrays, step.slot_mapping, step.block_tables)


def _mirrored(buffers: StepBuffers) -> list[Mirrored]:
    """Return the arrays of a step that ranks read, for the link to the other host."""
    extents = {
        Extent.TOKENS: (buffers.token_ids, buffers.positions, *buffers.slot_mapping),
        Extent.ROWS: (buffers.context_lens, *buffers.block_tables),
        Extent.EDGES: (buffers.query_start,),
        Extent.LOGITS: (buffers.logits_rows,),
    }
    return [Mirrored(array, extent, len(array)) for extent, arrays in extents.items() for array in arrays]


def _address(arrays: StepBuffers | StepInputs) -> int:
    return int(arrays.token_ids.ctypes.data)
