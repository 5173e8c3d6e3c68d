"""The parts of the npu backend on the double: checks of arguments, pages, programs on disk, ends of processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.checkpoints import make_checkpoint
from tests.npu.installed import with_double

CASES = ("checks_every_argument", "copies_pages", "keeps_programs", "names_a_mismatch", "spreads_over_devices")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), dtype="bfloat16")


def start(case: str, model: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "tests.npu.device_cases", case, str(model)]
    variables = {**os.environ, **with_double()}
    return subprocess.Popen(command, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize("case", CASES)
def test_case(case: str, model: Path) -> None:
    with start(case, model) as process:
        out, err = process.communicate()
        assert process.returncode == 0 and out.endswith("ok\n"), err


def test_the_keeper_clears_up_after_a_killed_worker(model: Path) -> None:
    """Neither its chips and the keeper itself stay, nor the shared memory that chips have for each other."""
    with start("is_killed", model) as process:
        assert process.stdout is not None
        window, *pids = process.stdout.readline().split()
        started = [psutil.Process(int(pid)) for pid in pids]
        assert len(started) > 1 and process.wait() == -signal.SIGKILL
        _, alive = psutil.wait_procs(started, timeout=10)
        assert not alive and not Path(window).exists()
