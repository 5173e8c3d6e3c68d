"""Run cases in forks of one process, so that torch and the runtime are imported once for all of them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

HANG_S = 2.0
"""How long a call that never returns is waited for."""
CALLING = b"calling\n"
"""What a case writes before a call that is expected to hang."""


class Outcome(NamedTuple):
    """What a case wrote to stdout and stderr, and its exit status, which is None if its call did not return."""

    out: str
    err: str
    status: int | None


def outcomes(module: str, cases: Sequence[str], variables: Mapping[str, str], *arguments: str) -> dict[str, Outcome]:
    """Run cases of a module in one process with these variables."""
    command = [sys.executable, "-P", "-m", module, ",".join(cases), *arguments]
    done = subprocess.run(command, env=variables, text=True, stdout=subprocess.PIPE, check=True)
    return {case: Outcome(*outcome) for case, outcome in map(json.loads, done.stdout.splitlines())}


def run_cases(cases: Mapping[str, Callable[..., None]]) -> None:
    """Run the cases that the first argument names, with the other arguments, and print a line for each."""
    names, *arguments = sys.argv[1:]
    for name in names.split(","):
        print(json.dumps((name, _outcome(cases[name], arguments))), flush=True)


def _outcome(case: Callable[..., None], arguments: Sequence[Any]) -> Outcome:
    """Run a case in a fork that leads a process group and starts in an empty folder, and end the group."""
    reader, writer = os.pipe()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        if (pid := os.fork()) == 0:
            os.close(reader)
            os.setpgid(0, 0)
            os.dup2(writer, 1)
            os.dup2(errors.fileno(), 2)
            os.chdir(folder)
            _run(case, arguments)
        os.close(writer)
        out, hangs = _read(reader)
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        errors.seek(0)
        return Outcome(out.decode(), errors.read(), None if hangs else status)


def _run(case: Callable[..., None], arguments: Sequence[Any]) -> None:
    """Run a case and end; one that fails ends its group, whose other processes may hold its pipes open."""
    try:
        case(*arguments)
        os.write(1, b"ok\n")
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os.killpg(0, signal.SIGKILL)


def _read(pipe: int) -> tuple[bytes, bool]:
    """Read to the end, and return whether a call did not return instead."""
    out = b""
    while select.select([pipe], [], [], HANG_S if out.endswith(CALLING) else None)[0]:
        if not (piece := os.read(pipe, 1 << 16)):
            return out, False
        out += piece
    return out, True
