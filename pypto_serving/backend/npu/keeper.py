"""End a process group when its leader ends: `python -m pypto_serving.backend.npu.keeper PIDFD GROUP`.

The runtime's chip processes are forked, poll without sleeping, and do not notice the end of their parent. They keep its
pipes open, so other processes would not notice it either. On the simulator, nothing else removes their shared memory.
"""

from __future__ import annotations

import contextlib
import multiprocessing.resource_tracker
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from pypto_serving.processes import ignore_terminal_signals

SHARED_MEMORY = Path("/dev/shm")


def keep_group() -> subprocess.Popen[bytes]:
    """Make this process lead a group that ends with it, and return the keeper. Must be called before any fork.

    Python's tracker of shared memory stays outside the group: it frees the runtime's memory when all others have ended.
    """
    leader = os.pidfd_open(os.getpid())
    command = [sys.executable, "-P", "-m", "pypto_serving.backend.npu.keeper", str(leader), str(os.getpid())]
    keeper = subprocess.Popen(command, pass_fds=[leader], process_group=0, stdin=subprocess.DEVNULL)
    os.close(leader)
    os.setpgid(0, keeper.pid)
    multiprocessing.resource_tracker.ensure_running()
    os.setpgid(0, 0)
    return keeper


def main() -> None:
    """Wait for the leader's end, then end its group, and remove its chips' shared memory, named after the leader."""
    leader, group = map(int, sys.argv[1:])
    ignore_terminal_signals()
    poller = select.poll()
    poller.register(leader, select.POLLIN)
    poller.poll()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    for window in SHARED_MEMORY.glob(f"simpler_{group:08x}_*"):
        window.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
