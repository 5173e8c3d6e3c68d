"""Start the ranks of a torch program, and send them steps. Does not import torch."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator

from pypto_serving.backend.base import Progress, StepInputs
from pypto_serving.backend.ranks.shared_steps import SharedBuffers
from pypto_serving.backend.ranks.supervisor import RankSupervisor
from pypto_serving.kernels import RanksGone, SharedMemory
from pypto_serving.processes import Parent
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.start import RankStart

_STEP = struct.Struct("=4i")
"""Message for a step: index of its shared buffers, numbers of tokens, rows and logits."""
_JOIN = b"J"
"""Message that all ranks have loaded."""


class TorchRanks(SharedBuffers):
    """Owns the ranks of a torch program besides the leader, and a socket to each.

    Ranks wait for steps on sockets, not in a collective, which would time out while the server is idle. `store`:
    descriptor of a file in which ranks exchange their addresses.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, SharedMemory.create())
        self.supervisor = RankSupervisor()
        self.store = os.memfd_create("pypto-addresses")
        self._sockets: list[socket.socket] = []

    def start(
        self, run: Callable[[Parent[RankStart]], None], config: EngineConfig, descendants: tuple[int, ...]
    ) -> None:
        """Start all ranks except the leader. Raises RankError if the system cannot start one."""
        ranks, links = config.parallel.topology.ranks[1:], {}
        for rank in ranks:
            ours, theirs = socket.socketpair()
            self._sockets.append(ours)
            links[rank.index] = {"steps": theirs.detach(), "store": os.dup(self.store)}
        self.supervisor.start(run, config, ranks, self.memory.fd, links, descendants)

    def gather(self, progress: Progress) -> None:
        """Wait until all ranks have loaded, and let them join the group. Raises the error of a rank, or RanksGone."""
        self.supervisor.await_ready(progress)
        self._send(_JOIN)

    def publish(self, inputs: StepInputs) -> None:
        """Make the other ranks compute a step. Raises RanksGone."""
        counts = (len(inputs.token_ids), len(inputs.context_lens), len(inputs.logits_rows))
        self._send(_STEP.pack(self.index_of(inputs), *counts))

    def _send(self, message: bytes) -> None:
        try:
            for each in self._sockets:
                each.sendall(message)
        except OSError:
            raise RanksGone from None


class LeaderSocket:
    """Owns the socket of another rank to its leader."""

    def __init__(self, steps: int) -> None:
        self._socket = socket.socket(fileno=steps)

    def await_others(self) -> None:
        """Wait until all ranks have loaded. Raises RanksGone."""
        if self._socket.recv(len(_JOIN)) != _JOIN:
            raise RanksGone

    def steps(self, shared: SharedBuffers) -> Iterator[StepInputs]:
        """Yield the steps that the leader publishes, until the leader ends."""
        while len(message := self._socket.recv(_STEP.size, socket.MSG_WAITALL)) == _STEP.size:
            index, tokens, rows, logits = _STEP.unpack(message)
            b = shared.buffers[index]
            yield StepInputs(
                token_ids=b.token_ids[:tokens],
                positions=b.positions[:tokens],
                query_start=b.query_start[: rows + 1],
                context_lens=b.context_lens[:rows],
                logits_rows=b.logits_rows[:logits],
                slot_mapping=tuple(slots[:tokens] for slots in b.slot_mapping),
                block_tables=tuple(tables[:rows] for tables in b.block_tables),
                fresh_blocks=(),
            )
