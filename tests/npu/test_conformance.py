"""The double of the runtime and the runtime itself, by the same cases; the latter where it is installed."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.npu import case_names
from tests.npu.installed import EACH_REVISION, INSTALLED, ROOT, with_double

WHICH = [
    *(
        pytest.param(with_double(revision), id=f"double-{revision}", marks=each.marks)
        for each in EACH_REVISION
        for revision in each.values
    ),
    pytest.param(
        {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        id="runtime",
        marks=[
            pytest.mark.npu,
            pytest.mark.timeout(900),
            pytest.mark.skipif(
                not INSTALLED, reason="PyPTO's runtime is not installed; docs/npu.md says where to get it"
            ),
        ],
    ),
]
HANG_S = 2.0
"""How long a call that never returns is waited for."""

Environment = dict[str, str]


@pytest.fixture(params=WHICH)
def variables(request: pytest.FixtureRequest) -> Environment:
    return {**os.environ, **request.param}


@contextlib.contextmanager
def started(case: str, variables: Environment, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A case in a process group of its own, which is ended."""
    command = [sys.executable, "-m", "tests.npu.conformance", case]
    process = subprocess.Popen(
        command, env=variables, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("case", case_names.CASES)
def test_case(case: str, variables: Environment, tmp_path: Path) -> None:
    with started(case, variables, tmp_path) as process:
        out, err = process.communicate()
        assert process.returncode == 0 and out.endswith("ok\n"), err


@pytest.mark.parametrize("case", case_names.HANGS)
def test_a_call_never_returns(case: str, variables: Environment, tmp_path: Path) -> None:
    with started(case, variables, tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "calling\n"
        readable, _, _ = select.select([process.stdout], [], [], HANG_S)
        assert not readable, "the call returned, or the process ended"


def test_children_outlive_a_killed_parent(variables: Environment, tmp_path: Path) -> None:
    with started("outlives_its_parent", variables, tmp_path) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert process.wait() == -signal.SIGKILL
        assert pids and all(psutil.pid_exists(pid) for pid in pids)
    psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=5)
    assert not any(psutil.pid_exists(pid) for pid in pids)
