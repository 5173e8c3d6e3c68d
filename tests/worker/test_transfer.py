"""TransferServer: loads wait for a step, and the worker is busy until all are reported."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from pypto_serving.ipc import SocketChannel
from pypto_serving.types.tier import TransferJob, TransferReport, Transfers
from pypto_serving.worker.transfer import Move, TransferServer


class SeenMover:
    """Moves nothing, and notes whether the server was busy when each job began."""

    def __init__(self) -> None:
        self.stores = {"host": SimpleNamespace(writable=True, close=lambda: None)}
        self.seen: list[bool] = []
        self.server: TransferServer | None = None

    def moves(self, job: TransferJob) -> list[Move]:
        assert self.server is not None
        self.seen.append(self.server.is_busy)
        return [Move(0, i, i, bytes(16)) for i in range(3)]

    def move(self, job: TransferJob, moves: Sequence[Move]) -> list[bool]:
        return [move.block != 1 for move in moves]


def test_a_load_waits_for_its_step_and_keeps_the_worker_busy() -> None:
    core, end = SocketChannel[TransferReport].pair(TransferReport)
    mover: Any = SeenMover()
    server = mover.server = TransferServer(SocketChannel(end, Transfers), mover, epoch=4)
    job = TransferJob(job_id=7, kind="load", tier="host", groups=b"", blocks=b"", slots=b"", keys=b"")
    core.send(Transfers(0, 2, [job]))
    core.flush()
    assert core.receive(0.05) is None
    busy = [server.is_busy]
    server.step_done(2)
    report = core.receive(10.0)
    assert report is not None and report.epoch == 4
    assert [(done.job_id, done.done, done.writable) for done in report.transfers] == [(7, b"\1\0\1", True)]
    assert [*busy, *mover.seen, server.is_busy] == [True, True, False]
    core.close()
    server.shut_down()
