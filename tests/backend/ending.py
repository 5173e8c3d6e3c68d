"""A rank that is ready and then ends: `python -m tests.backend.ending FD`.

HostJoin.address says how: it leaves, or fails once it has read all from the descriptor that HostJoin.num_threads names.
"""

from __future__ import annotations

import os
import sys

from pypto_serving.backend.ranks.shared_steps import READY
from pypto_serving.errors import EngineDeadError
from pypto_serving.processes import Parent, run_child
from pypto_serving.types.start import HostJoin

MODULE = "tests.backend.ending"


def run(parent: Parent[HostJoin]) -> None:
    parent.progress(READY, 1, 1)
    if parent.start.address == "fails":
        assert os.read(parent.start.num_threads, 1) == b""
        raise EngineDeadError("a kernel failed on purpose")


if __name__ == "__main__":
    sys.exit(run_child(run, HostJoin))
