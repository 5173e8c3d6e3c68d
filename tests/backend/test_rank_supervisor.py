"""Processes of ranks: which one is to blame where several end, and their terminal."""

from __future__ import annotations

import os
import re
import select
import signal
from pathlib import Path

import pytest

from pypto_serving.backend.ranks import supervisor
from pypto_serving.backend.ranks.supervisor import RankError, RankSupervisor
from pypto_serving.processes import Child, start_module
from pypto_serving.types.start import HostJoin
from tests.backend.ending import MODULE


def rank(how: str, fd: int) -> Child:
    start = HostJoin(address=how, secret_file="", model="", cache_dir="", nodes=(), num_threads=fd)
    return start_module(MODULE, start, shared=(fd,))


def test_a_process_group_of_its_own_may_write_to_any_terminal() -> None:
    """Also to one that stops groups in the background which write (`stty tostop`)."""
    read, write = os.pipe()
    start = HostJoin(address="fails", secret_file="", model="", cache_dir="", nodes=(), num_threads=read)
    child = start_module(MODULE, start, shared=(read,), leads=True)
    select.select([child.pipe], [], [])
    status = Path(f"/proc/{child.pid}/status").read_text()
    ignored = int(re.findall(r"SigIgn:\s*([0-9a-f]+)", status)[0], 16)
    assert os.getpgid(child.pid) == child.pid and ignored >> (signal.SIGTTOU - 1) & 1
    child.end(0)
    os.close(read)
    os.close(write)


def test_a_rank_that_left_is_not_to_blame() -> None:
    """It ends first, since it waits for the one that fails; the other one holds until then."""
    members, (read, write) = RankSupervisor(), os.pipe()
    members.add("rank 1", rank("leaves", write))
    os.close(write)
    members.add("rank 2", rank("fails", read))
    os.close(read)
    with pytest.raises(RankError, match="a kernel failed on purpose"):
        members.await_ready(lambda *_: None)
        members.await_end()
    members.end()


def test_a_rank_that_left_is_named_where_nobody_is_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "BLAME_S", 0.1)
    members, (read, write) = RankSupervisor(), os.pipe()
    members.add("rank 1", rank("leaves", write))
    members.add("rank 2", rank("fails", read))
    os.close(read)
    with pytest.raises(RankError, match="rank 1 gave up a step"):
        members.await_ready(lambda *_: None)
        members.await_end()
    members.end()
    os.close(write)
